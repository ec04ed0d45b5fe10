"""`response_format`: the answer's grammar, in the form of the model's input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from canvasrt.containers.openai.body import Sampling, settle
from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.fields import GENERATION
from canvasrt.containers.untrusted import load_json

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# vLLM's names → types of `response_format`.
_GUIDED = {"json": "json_schema", "regex": "regex", "choice": "grammar", "grammar": "grammar"}
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


def format_of(request: Sampling) -> Mapping[str, Any] | None:
    """Return the one `response_format` that a request has, be it under vLLM's names. ApiError for several."""
    given, found = request.structured_outputs or {}, []
    for name, value in given.items():
        if name not in (*_GUIDED, "json_object"):
            settle(f"structured_outputs.{name}", value, GENERATION, request.ignored)
    if given.get("json_object"):
        found.append({"type": "json_object"})
    for name, kind in _GUIDED.items():
        for value in (given.get(name), getattr(request, f"guided_{name}")):
            if value is None:
                continue
            if name == "choice":  # in Lark, strings are JSON's
                value = "start: " + " | ".join(json.dumps(each) for each in value)
            if name == "json":
                try:
                    value = {"schema": load_json(value) if isinstance(value, str) else value}
                except ValueError as error:
                    raise _wrong("guided_json", f"is not JSON: {error}") from None
            found.append({"type": kind, kind: value})
    plain = request.response_format is None or request.response_format.get("type") == "text"
    if len(found) + (not plain) > 1:
        raise _wrong("structured_outputs", "is one of several formats: send one")
    wanted = found[0] if found else request.response_format
    inner = (wanted or {}).get("json_schema")
    if request.ignored is None or not isinstance(inner, dict):
        return wanted
    schema = _without_unique(inner.get("schema"))
    if schema != inner.get("schema"):
        request.ignored.note("uniqueItems is not enforced: elements of arrays may repeat.")
    return {**(wanted or {}), "json_schema": {**inner, "schema": schema}}


def _without_unique(schema: Any, names: bool = False) -> Any:
    """Return a schema without `uniqueItems`. names: the keys are those of properties or definitions."""
    if isinstance(schema, list):
        return [_without_unique(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if not names and key in ("const", "enum", "default", "examples")
        else _without_unique(value, not names and key in _NAMED)
        for key, value in schema.items()
        if names or key != "uniqueItems"
    }


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
