"""Exceptions for what a user can fix. Anything else is a bug and keeps its traceback."""

from collections.abc import Sequence


class CanvasError(Exception):
    """A mistake in the input or the environment: what is wrong, and what to do about it.

    `log` holds the last lines of an explaining log that the user has not seen yet.
    """

    def __init__(self, message: str, hint: str = "", log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = tuple(log)


class UsageError(CanvasError):
    """Wrong use: arguments that would be wrong on any machine. The command line exits with 2."""
