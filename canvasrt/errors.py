"""The exceptions for what a user can mend; everything else is a bug and keeps its traceback."""


class CanvasError(Exception):
    """A mistake in the input or the environment: what is wrong, and what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CanvasError):
    """An argument that no input or machine could make right; the command line exits with 2."""
