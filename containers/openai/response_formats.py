"""Converts `response_format` to the model's `grammar` input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from canvasrt.containers.openai.body import Sampling
from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.fields import GENERATION, known
from canvasrt.containers.untrusted import load_json

# vLLM's names → types of `response_format`.
_GUIDED = {"json": "json_schema", "regex": "regex", "choice": "grammar", "grammar": "grammar"}
# Types of `response_format` → the field that holds the format.
_TYPES = {"text": "", "json_object": "schema", "json_schema": "json_schema"} | {
    "regex": "regex",
    "grammar": "grammar",
}


class Format(NamedTuple):
    """The model's input `grammar`, and the path of the request's field that `grammar` comes from."""

    grammar: dict[str, Any]
    path: str


def format_of(request: Sampling) -> Format | None:
    """Return the format that a request sets in OpenAI's or vLLM's fields; None for plain text. If a format is
    wrong, or if there are several formats, raises an ApiError that names the field.

    The types `json_schema` and `json_object` are OpenAI's; `regex` and `grammar` (Lark or GBNF) are extensions.
    """
    found = [*_guided(request), *_response_format(request)]
    if len(found) > 1:
        raise _wrong(found[0].path, "is one of several formats: send one")
    return found[0] if found else None


def _guided(request: Sampling) -> Iterator[Format]:
    names = (*_GUIDED, "json_object")
    given = known(
        request.structured_outputs or {}, names, "structured_outputs", GENERATION, request.ignored
    )
    if given.get("json_object"):
        yield Format({"type": "json_object"}, "structured_outputs.json_object")
    for name, kind in _GUIDED.items():
        for path, value in (
            (f"structured_outputs.{name}", given.get(name)),
            (f"guided_{name}", getattr(request, f"guided_{name}")),
        ):
            if value is None:
                continue
            if name == "choice":
                if not value or not isinstance(value, list) or {*map(type, value)} != {str}:
                    raise _wrong(path, "is not a list of texts")
                # A JSON string is also a string literal in Lark.
                value = "start: " + " | ".join(json.dumps(each) for each in value)
            if name == "json" and isinstance(value, str):
                try:
                    value = load_json(value)
                except ValueError as error:
                    raise _wrong(path, f"is not JSON: {error}") from None
            yield Format({"type": kind, "schema" if name == "json" else kind: value}, path)


def _response_format(request: Sampling) -> Iterator[Format]:
    given, path, ignored = request.response_format, "response_format", request.ignored
    if given is None:
        return
    kind = given.get("type")
    if kind not in tuple(_TYPES):  # a tuple, because a dict cannot look up an unhashable `kind`
        raise _wrong(f"{path}.type", f"is {kind!r}: give one of {', '.join(_TYPES)}")
    field = _TYPES[kind]
    given = known(given, ("type", field), path, GENERATION, ignored)
    if kind == "json_schema":
        path, given = f"{path}.json_schema", given.get("json_schema")
        if not isinstance(given, dict):
            raise _wrong(path, "is not an object")
        names = ("name", "schema", "strict", "description")
        given, field = known(given, names, path, GENERATION, ignored), "schema"
    if kind == "json_object" and given.get("schema") is not None:
        kind = "json_schema"  # as in llama.cpp, this type may come with a schema
    if kind == "json_object":
        yield Format({"type": kind}, path)
    elif kind != "text":
        yield Format({"type": kind, field: given.get(field)}, f"{path}.{field}")


def _wrong(path: str, what: str) -> Exception:
    return bad_request(f"{path} {what}.", path, "invalid_value")
