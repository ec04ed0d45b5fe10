"""Derives a command's options from the fields of dataclasses."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from canvasrt.option import CommandOption, flags_of, option_of

Command = Callable[..., None]


def with_fields(
    argument: str,
    *kinds: type,
    unset: bool = False,
    only: Collection[str] = (),
    shown: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Command], Command]:
    """Replace an argument of a command by options, one for each dataclass field that has a help text.

    The command receives an instance of the dataclass. If `unset` is true, it instead receives a mapping from option
    names to values, in which absent options are None. Several dataclasses require `unset`. `only` selects
    fields by name. `shown` overrides the defaults that the help shows.
    """
    found = {
        option_name(kind, each): _argument(kind, each, unset, shown.get(each.name))
        for kind in kinds
        for each in fields(kind)
        if (of := option_of(each)) and of.help and (not only or each.name in only)
    }

    def make(values: dict[str, Any]) -> Any:
        if unset:
            return values
        (kind,) = kinds
        chosen = {name: value for name, value in values.items() if value is not None}
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()})

    return lambda command: with_options(command, argument, found, make)


def with_options(
    command: Command,
    argument: str,
    options: Mapping[str, inspect.Parameter],
    make: Callable[[dict[str, Any]], Any],
) -> Command:
    """Replace an argument of a command by these options. The argument's value is `make(values)`."""
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += options.values() if each.name == argument else own

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        values = {name: given.pop(name) for name in options}
        command(**given, **{argument: make(values)})

    del wrapped.__wrapped__  # otherwise Typer would read the signature of `command`
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def option_name(kind: type, field: Field[Any]) -> str:
    """Return a field's option name: the field's name, followed by the class's `SUFFIX` if there is one."""
    return field.name + getattr(kind, "SUFFIX", "")


def _argument(kind: type, field: Field[Any], unset: bool, shown: str | None) -> inspect.Parameter:
    of = option_of(field)
    assert of is not None
    of = replace(of, shown=shown or of.shown)
    name = option_name(kind, field)
    default = None if unset else _default(field)
    value, is_optional = _type(kind, field)
    annotation: Any = value | None if default is None or is_optional else value
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) or None if isinstance(default, tuple) else default,
        annotation=Annotated[annotation, _typer_option(name, field, of, unset)],
    )


def _typer_option(name: str, field: Field[Any], of: CommandOption, unset: bool) -> Any:
    help = f"{of.help.removesuffix('.')}; {of.variable}." if of.variable else of.help
    return typer.Option(
        *flags_of(name, of),
        metavar=of.metavar,
        min=of.least,
        max=of.most,
        show_default=of.shown or _shown(_default(field), unset),
        help=help,
    )


def _shown(default: Any, unset: bool) -> str | bool:
    """Return the default that the help shows. True lets Typer show its own default; False shows none."""
    if default in (None, ()) or isinstance(default, bool):
        return False
    if not unset:
        return True
    if isinstance(default, float):
        return f"{default:g}"
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def _type(kind: type, field: Field[Any]) -> tuple[Any, bool]:
    """Return the type of an option's value, and whether the value can be None. If the option's `read` parses a list
    from one text, the type is str."""
    found = get_type_hints(kind, include_extras=True)[field.name]
    is_optional = get_origin(found) in (Union, types.UnionType)
    if is_optional:
        (found,) = (each for each in get_args(found) if each is not type(None))
    of = option_of(field)
    if get_origin(found) is not None:  # a sequence of texts
        return (str if of is not None and of.read else list[str]), is_optional
    assert found in (int, float, bool, str, Path), field.name
    return found, is_optional
