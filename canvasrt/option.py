"""An option of the command line, described on the dataclass field that holds its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any

_KEY = "option"


@dataclass(frozen=True)
class CommandOption:
    """What a field does not say itself.

    Attributes:
        help: one sentence; empty if there is only the variable.
        flag: the option, with short or negative forms after it, such as `--log/--no-log`; empty for the field's name.
        metavar: what stands for the value in the help.
        least, most: limits of a number.
        shown: the default in the help, if it is not the field's.
        variable: an environment variable that sets it too.
        read: parses the variable's text, and the command line's; ValueError says what is wrong with it.
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    shown: str | None = None
    variable: str | None = None
    read: Callable[[str], Any] | None = None


def option(help: str, **more: Any) -> dict[str, Any]:
    """Return a field's metadata; the arguments are `CommandOption`'s."""
    return {_KEY: CommandOption(help, **more)}


def port_option(help: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a field that is a port; the arguments are `CommandOption`'s."""
    return option(help, **{"metavar": "PORT", "least": 0, "most": 65535} | more)


def option_of(field: Field[Any]) -> CommandOption | None:
    """Return a field's option; None for a field that nothing outside sets."""
    found: CommandOption | None = field.metadata.get(_KEY)
    return found


def flags_of(name: str, of: CommandOption) -> list[str]:
    """Return the flags of an option whose value is called `name`, the usual one first."""
    return of.flag.split(", ") if of.flag else [f"--{name.replace('_', '-')}"]
