"""A command-line option, described in the metadata of the dataclass field that holds its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any

_KEY = "option"


@dataclass(frozen=True)
class CommandOption:
    """The description of an option, in addition to its field's name, type and default.

    Attributes:
        help: one sentence; empty if only the environment variable can set the value.
        flag: the flag and its short or negative form, such as `--log/--no-log`; empty if the flag is the field's name.
        metavar: the placeholder for the value in the help.
        least, most: limits of a number.
        shown: the default that the help shows, if it is not the field's default.
        variable: an environment variable that also sets the value.
        read: parses text from the variable or the command line; its ValueError says what is wrong with the text.
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


def limit_option(help: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a field that limits what callers can ask for. The value None means no limit."""
    return option(help, **{"metavar": "N", "least": 1, "shown": "none"} | more)


def option_of(field: Field[Any]) -> CommandOption | None:
    """Return a field's option; None for a field that users cannot set."""
    found: CommandOption | None = field.metadata.get(_KEY)
    return found


def flags_of(name: str, of: CommandOption) -> list[str]:
    """Return the flags of the option for the field `name`, the usual flag first."""
    return of.flag.split(", ") if of.flag else [f"--{name.replace('_', '-')}"]


def read_port(text: str) -> int:
    """Parse a port number."""
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise ValueError("not a port number")
    return int(text)


def read_count(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("not a whole number above 0")
    return int(text)


def read_switch(text: str) -> bool:
    """Parse a switch: return whether it is on."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError("not 0 or 1")
    return words[text.lower()]


def read_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, without duplicates."""
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not names:
        raise ValueError("contains no name")
    return names
