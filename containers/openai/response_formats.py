"""`response_format`: what an answer must follow, as the served model takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from canvasrt.containers.openai.errors import bad_request

_TYPES = ("text", "json_object", "json_schema", "regex", "grammar")


def grammar_of(given: Mapping[str, Any] | None) -> str | None:
    """Return the model's `grammar`, or None for plain text. ApiError names a field that is wrong.

    OpenAI has `json_schema` and `json_object`; `regex` and `grammar` (Lark) are our own.
    """
    if given is None:
        return None
    kind = given.get("type")
    if kind not in _TYPES:
        raise _wrong("response_format.type", f"is {kind!r}: give one of {', '.join(_TYPES)}")
    field = {"json_schema": "json_schema", "regex": "regex", "grammar": "grammar"}.get(kind)
    for name in given:
        if name not in ("type", field):
            raise _wrong(f"response_format.{name}", f"is unknown for the type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": kind})
    if kind != "json_schema":
        return json.dumps({"type": kind, kind: given.get(kind)})
    inner = given.get("json_schema")
    if not isinstance(inner, dict):
        raise _wrong("response_format.json_schema", "is not an object")
    for name in inner:
        if name not in ("name", "schema", "strict", "description"):
            raise _wrong(f"response_format.json_schema.{name}", "is unknown")
    return json.dumps({"type": kind, "schema": inner.get("schema")})


def named_format(path: str) -> str:
    """Return the caller's name for a path of the model's `grammar`."""
    names = {
        "grammar.schema": "response_format.json_schema.schema",
        "grammar.regex": "response_format.regex",
        "grammar.grammar": "response_format.grammar",
    }
    return names.get(path, "response_format")


def _wrong(path: str, what: str) -> Exception:
    return bad_request(f"{path} {what}.", path, "invalid_value")
