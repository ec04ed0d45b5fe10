"""Reads YAML documents and checks every key."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from canvasrt.errors import CanvasError

_MISSING = object()


_BOOLEAN = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Has YAML 1.2's booleans: `yes`, `no`, `on` and `off` are strings."""


_Loader.yaml_implicit_resolvers = {
    first: [each for each in known if each[0] != _BOOLEAN]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _BOOLEAN, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def read_yaml(file: Path, hint: str) -> Any:
    """Return the document in a YAML file. The message of a CanvasError names the file and the broken line."""
    try:
        return _Loader(file.read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CanvasError(f"cannot read {file}: {why}", hint) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-01
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise CanvasError(f"{file}{line} is not YAML: {problem}", hint) from error


class Fields:
    """A mapping in a document. Methods read one key each; `finish` raises CanvasError for keys that were not read."""

    def __init__(self, data: Any, where: str, hint: str, path: str = "") -> None:
        self.where, self._hint, self._path = where, hint, path
        if not isinstance(data, Mapping):
            raise CanvasError(
                f"{where}: {path or 'the document'} should be a mapping of keys to values", hint
            )
        self._data = dict(data)
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """Return a key's unchecked value. Raises CanvasError if the key is missing and has no default."""
        self._taken.add(key)
        if key not in self._data and default is _MISSING:
            raise CanvasError(f"{self.where} has no {self._name(key)}", self._hint)
        return self._data.get(key, default)

    def wrong(self, key: str, wanted: str, found: Any) -> CanvasError:
        """Return the error for an invalid value."""
        return CanvasError(
            f"{self.where}: {self._name(key)} should be {wanted}, not {found!r}", self._hint
        )

    def allow(self, *keys: str) -> None:
        """Allow keys that other code reads."""
        self._taken.update(keys)

    def finish(self) -> None:
        """Raise CanvasError for keys that were neither read nor allowed."""
        unknown = [self._name(str(key)) for key in self._data if key not in self._taken]
        if unknown:
            known = ", ".join(sorted(self._taken))
            raise CanvasError(
                f"{self.where}: unknown key {', '.join(unknown)}", f"give one of {known}"
            )

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, "a string", value)
        return value.strip()

    def texts(self, key: str, required: bool = True) -> list[str]:
        """Return a string, or a list of strings, as a list. Empty strings are errors."""
        value = self.take(key, _MISSING if required else [])
        values = [value] if isinstance(value, str) else value
        whole = isinstance(values, list) and all(isinstance(v, str) and v for v in values)
        if not whole or (required and not values):
            raise self.wrong(key, "a string or a list of strings", value)
        return values

    def items(self, key: str, required: bool = True) -> list[Fields]:
        """Return a list of mappings. If `required` is true, an empty list is an error."""
        value = self.take(key, _MISSING if required else [])
        if not isinstance(value, list) or (required and not value):
            raise self.wrong(key, "a list with at least one entry" if required else "a list", value)
        return [
            Fields(item, self.where, self._hint, f"{self._name(key)}[{number}]")
            for number, item in enumerate(value)
        ]

    def fields(self, key: str) -> Fields:
        """Return a key's mapping; an empty mapping if the key is missing."""
        return Fields(self.take(key, None) or {}, self.where, self._hint, self._name(key))

    def one_of(self, key: str, values: Sequence[Any], default: Any = _MISSING) -> Any:
        value = self.take(key, default)
        if value not in values:
            known = ", ".join("null" if each is None else str(each) for each in values)
            raise self.wrong(key, f"one of {known}", value)
        return value

    def integer(self, key: str, default: int, least: int) -> int:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"a whole number of at least {least}", value)
        return value

    def optional_integer(self, key: str, least: int) -> int | None:
        return None if self.take(key, None) is None else self.integer(key, 0, least)

    def number(
        self, key: str, default: float | None, least: float, most: float = math.inf
    ) -> float | None:
        """Return a finite number from `least` to `most`, or the default if the key is missing or null."""
        value = self.take(key, default)
        if value is None:
            return default
        if isinstance(value, str):  # PyYAML reads 1e-3 as a string, because it has no point
            with contextlib.suppress(ValueError):
                value = float(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not least <= value <= most:
            span = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise self.wrong(key, f"a number {span}", value)
        return float(value)

    def _name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key
