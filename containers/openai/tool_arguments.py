"""Parses the arguments of Gemma 4's tool calls, `{key:<|"|>text<|"|>,n:3}`, to Python values.

The model sometimes deviates from this syntax: it quotes strings as JSON or Python does, or not at all, or writes `=` in
place of `:`. These forms are accepted, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from canvasrt.chat_tokens import QUOTE
from canvasrt.containers.untrusted import load_json

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"\s*([^\s:={}\[\],\"'<]+)\s*[:=]")
_BARE = re.compile(r"[^,{}\[\]]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_DEPTH = 64  # maximum nesting of objects and lists


class CallError(ValueError):
    """The text cannot be parsed as a tool call's arguments."""


def read_arguments(text: str, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments in `text`, which begins with `{` and ends with the matching `}`.

    `schema` is the JSON schema of the tool's parameters. It decides whether an unquoted `42` is a string or a number.
    Raises CallError if the text cannot be parsed.
    """
    try:
        whole = load_json(text)
        json.dumps(whole, allow_nan=False)
        if isinstance(whole, dict):
            return whole
    except (ValueError, RecursionError):
        pass  # the usual case, because the model does not quote names
    reader = _Reader(text)
    arguments = reader.object(schema or {}, 0)
    reader.skip()
    if reader.place != len(text):
        raise CallError(f"text follows the arguments: {text[reader.place :][:20]!r}")
    return arguments


class _Reader:
    """A recursive-descent parser. `place` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        # Quote characters for which the rest of the text has no closing quote.
        self._unclosed: set[str] = set()

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.place)
        assert match is not None
        self.place = match.end()

    def object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        values: dict[str, Any] = {}
        self._take("{")
        while not self._ends("}", depth):
            name = self._key()
            below = properties.get(name)
            below = below if isinstance(below, Mapping) else {}
            values[name] = self._value(below, depth + 1, empty=True)
        return values

    def _list(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        items = schema.get("items")
        items = items if isinstance(items, Mapping) else {}
        values: list[Any] = []
        self._take("[")
        while not self._ends("]", depth):
            values.append(self._value(items, depth + 1))
        return values

    def _ends(self, closing: str, depth: int) -> bool:
        """Skip commas and spaces. If `closing` comes next, consume it and return True."""
        if depth > _DEPTH:
            raise CallError(f"more than {_DEPTH} levels of nesting")
        while self.text[self.place : self.place + 1] in (",", " ", "\n", "\t", "\r"):
            self.place += 1
        if self.text.startswith(closing, self.place):
            self.place += 1
            return True
        if self.place >= len(self.text):
            raise CallError(f"{closing} is missing")
        return False

    def _take(self, character: str) -> None:
        self.skip()
        if not self.text.startswith(character, self.place):
            raise CallError(f"{character} is missing at character {self.place}")
        self.place += 1

    def _key(self) -> str:
        self.skip()
        quoted = self._quoted()
        if quoted is not None:
            self.skip()
            if self.text[self.place : self.place + 1] not in (":", "="):
                raise CallError(f"{quoted!r} has no value")
            self.place += 1
            return quoted
        match = _KEY.match(self.text, self.place)
        if match is None:
            raise CallError(f"a name is missing at character {self.place}")
        self.place = match.end()
        return match[1]

    def _value(self, schema: Mapping[str, Any], depth: int, empty: bool = False) -> Any:
        """Parse a value. If `empty`, a missing value before a comma or `}` becomes an empty string."""
        self.skip()
        quoted = self._quoted()
        if quoted is not None:
            return quoted
        first = self.text[self.place : self.place + 1]
        if first == "{":
            return self.object(schema, depth)
        if first == "[":
            return self._list(schema, depth)
        match = _BARE.match(self.text, self.place)
        assert match is not None
        if match.end() == self.place and (not empty or first not in (",", "}")):
            raise CallError(f"a value is missing at character {self.place}")
        self.place = match.end()
        return _bare(match[0].strip(), schema)

    def _quoted(self) -> str | None:
        """Parse a string in the model's, JSON's or Python's quotes. Return None if no quoted string comes next."""
        text, begin = self.text, self.place
        if text.startswith(QUOTE, begin):
            end = text.find(QUOTE, begin + len(QUOTE))
            if end < 0:
                raise CallError("a string does not end")
            self.place = end + len(QUOTE)
            return text[begin + len(QUOTE) : end]
        mark = text[begin : begin + 1]
        if mark not in ('"', "'") or mark in self._unclosed:
            return None
        # The string ends at a quote before a delimiter; other quotes belong to the text, as in 'it's'.
        match = re.compile(rf"{mark}((?:\\.|[^\\])*?){mark}(?=\s*[,:=}}\]])", re.DOTALL).match(
            text, begin
        )
        if match is None:
            # The quote is remembered, because searching again for every value would take quadratic time.
            self._unclosed.add(mark)
            return None
        self.place = match.end()
        return _unescaped(match[1], mark)


def _unescaped(text: str, mark: str) -> str:
    body = text.replace(f"\\{mark}", mark) if mark == "'" else text
    try:
        return str(json.loads('"' + (body.replace('"', '\\"') if mark == "'" else body) + '"'))
    except json.JSONDecodeError:
        return body


def _bare(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        try:
            number = load_json(text)
        except ValueError:
            return text
        return number if math.isfinite(number) else text
    return text
