"""Exceptions for problems that a user can fix. Any other exception is a bug, and is shown with its traceback."""

from collections.abc import Sequence
from typing import ClassVar


class CanvasError(Exception):
    """A mistake in the input or the environment. `message` says what is wrong, and `hint` what to do about it.

    Both texts are written where the error is raised. An unreadable or invalid file is a CanvasError and not a
    UsageError, because the same command works once the file is corrected.

    log: last lines of a log that explains the error, if the user has not seen it.
    """

    exit_code: ClassVar[int] = 1  # exit code of the command line

    def __init__(self, message: str, hint: str = "", log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = tuple(log)


class UsageError(CanvasError):
    """A mistake in the arguments: they are invalid on any machine, regardless of its files."""

    exit_code = 2


class EngineError(CanvasError):
    """The engines or their device failed; the request is not the cause.

    fatal: no pass can succeed in this process any more.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str = "", fatal: bool = False) -> None:
        super().__init__(message, hint)
        self.fatal = fatal


class StalledError(EngineError):
    """A process has stopped making progress."""

    exit_code = 4
