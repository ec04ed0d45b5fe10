"""The exceptions for what a user can fix; everything else is a bug and keeps its traceback."""

from collections.abc import Sequence


class CanvasError(Exception):
    """A mistake in the input or the environment: what is wrong, and what to do about it.

    `log` holds the last lines of a log that explains it, when nobody has seen them yet.
    """

    def __init__(self, message: str, hint: str = "", log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = tuple(log)


class UsageError(CanvasError):
    """Wrong use: an argument that no input or machine could make right. The command line exits with 2."""
