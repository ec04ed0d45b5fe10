"""Rewrites what llguidance does not support: GBNF, and arrays of unique elements."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import permutations
from typing import Any

from canvasrt.errors import CanvasError

# Limits for one `uniqueItems`: the number of arrays that it expands to, and the size of all these arrays as JSON.
MAX_ARRAYS, MAX_BYTES = 400, 32_768
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
_ABOUT = ("title", "description", "default", "examples")


def lark_of(text: str, path: str) -> str:
    """Return a grammar in Lark. GBNF, whose rules are `name ::= …`, is translated; raises CanvasError if that fails."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark  # only the extra `serve` installs it

    try:
        return any_to_lark(text)
    except Exception as error:  # errors have many types, such as IndexError and RecursionError
        raise CanvasError(f"{path} is not a grammar: {error}"[:300], "correct it") from None


def without_unique(schema: Any, path: str, root: Any = None, names: bool = False) -> Any:
    """Return a schema in which every array with `uniqueItems` is replaced by an enum of all possible arrays. If an
    array has at most one element, only the keyword is removed.

    names: whether the keys of `schema` are names of properties or definitions, not keywords. Raises CanvasError, whose
    message begins with `path`, if the possible arrays are too many or unknown.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [without_unique(each, path, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if not names and schema.get("uniqueItems") is True and schema.get("maxItems") not in (0, 1):
        about = {key: value for key, value in schema.items() if key in _ABOUT}
        return {**about, "enum": _arrays(schema, path, root)}
    return {
        key: value
        if not names and key in _VALUES
        else without_unique(value, path, root, not names and key in _NAMED)
        for key, value in schema.items()
        if names or key != "uniqueItems"
    }


def _arrays(schema: Mapping[str, Any], path: str, root: Any) -> list[Any]:
    """Return the arrays that satisfy a schema, and null if the schema's type allows null."""
    wanted = schema.get("type")
    kinds = wanted if isinstance(wanted, list) else [wanted]
    if "array" not in kinds or any(each not in ("array", "null") for each in kinds):
        raise CanvasError(
            f"{path} has uniqueItems, but its type is {wanted!r}",
            'give it the type "array", or leave out uniqueItems',
        )
    known = {"type", "items", "minItems", "maxItems", "uniqueItems", "$defs", *_ABOUT}
    if others := sorted(set(schema) - known):
        raise CanvasError(f"{path} has uniqueItems next to {others[0]}", "leave out one of them")
    items = schema.get("items")
    reference = items.get("$ref") if isinstance(items, Mapping) else None
    if isinstance(reference, str) and reference.startswith("#/"):
        items = root
        for part in reference.split("/")[1:]:
            items = items.get(part) if isinstance(items, Mapping) else None
    values = items.get("enum") if isinstance(items, Mapping) else None
    if isinstance(items, Mapping) and items.get("type") == "boolean":
        values = [False, True]
    if not isinstance(values, list):
        raise CanvasError(
            f"{path} has uniqueItems, but its items have no enum",
            "give items an enum, or leave out uniqueItems",
        )
    values = [json.loads(each) for each in dict.fromkeys(map(json.dumps, values))]
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if not (isinstance(least, int) and isinstance(most, int)):
        raise CanvasError(
            f"{path} has minItems or maxItems that is not a whole number", "correct it"
        )
    # With more than MAX_ARRAYS values, even the arrays of one element are too many. Counting all would be slow.
    few = values[: MAX_ARRAYS + 1]
    sizes = range(max(least, 0), min(most, len(few)) + 1)
    count = sum(math.perm(len(few), size) for size in sizes)
    if not 0 < count <= MAX_ARRAYS or count * len(json.dumps(values)) > MAX_BYTES:
        shown = count if count <= MAX_ARRAYS else f"more than {MAX_ARRAYS}"
        raise CanvasError(
            f"{path}: {shown} arrays satisfy its uniqueItems",
            f"limit enum or maxItems to allow 1 to {MAX_ARRAYS} short arrays, or leave out uniqueItems",
        )
    arrays = [list(each) for size in sizes for each in permutations(values, size)]
    return [*arrays, None] if "null" in kinds else arrays
