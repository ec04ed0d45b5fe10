"""Exceptions for what a user can fix. Anything else is a bug and keeps its traceback."""

from collections.abc import Sequence
from typing import ClassVar


class CanvasError(Exception):
    """A mistake in the input or the environment: what is wrong, and what to do about it.

    A file that cannot be read, or that does not hold what it should, is one, and so is standard
    input: the same command is right once its file is.

    `log` holds the last lines of an explaining log that the user has not seen yet.
    """

    exit_code: ClassVar[int] = 1  # of the command line

    def __init__(self, message: str, hint: str = "", log: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = tuple(log)


class UsageError(CanvasError):
    """Wrong use: arguments that would be wrong on any machine, whatever its files hold."""

    exit_code = 2


class EngineError(CanvasError):
    """The engines or their device failed; the request that met it is not at fault.

    After a `fatal` one, no pass can succeed in this process.
    """

    exit_code = 3

    def __init__(
        self, message: str, hint: str = "", log: Sequence[str] = (), fatal: bool = False
    ) -> None:
        super().__init__(message, hint, log)
        self.fatal = fatal


class StalledError(EngineError):
    """A process makes no progress any more."""

    exit_code = 4
