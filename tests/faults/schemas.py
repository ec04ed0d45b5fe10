"""JSON schemas: ordinary ones, hostile ones, and values where a keyword does not take them."""

from __future__ import annotations

import random
from typing import Any

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_NUMBERS = (0, 1, 2, 3, 7, 97, 999_983, -1, 2**31, 2**63, 10**30, 0.1, 0.5, 1e-7, 1e-300, 1e308)
_COUNTS = (0, 1, 2, 5, 64, 1000, 100_000, 2**31, 2**64, -1, 1.5)
_NAMES = ("a", "b", "é", "", "$ref", "__proto__", '"', "\n", "a" * 300)
_PATTERNS = ("^a+$", "[0-9]{2,}", "(a|b)*a(a|b){12}", "^(a+)+$", ".*", "\\p{L}", "[", "(?=a)", "")
_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "uuid", "ipv4", "ipv6", "uri", "hostname"),
    *("idn-email", "regex", "unknown"),
)
_REFS = ("#", "#/$defs/a", "#/$defs/b", "#/$defs/none", "#/properties/a", "http://x/y", "a", "#a")
_ODD = (None, True, False, "a", [], {}, [[]], {"type": []}, -1, 1e400)


def any_schema(draw: random.Random) -> Any:
    """Return a schema; some are true or false, and some are none."""
    chance = draw.random()
    if chance < 0.2:
        return _hostile(draw)
    schema = _schema(draw, 3)
    if chance < 0.6:
        schema["$defs"] = {name: _schema(draw, 2) for name in ("a", "b")}
    return schema


def _hostile(draw: random.Random) -> dict[str, Any]:
    """Return a schema that is small, or just allowed, and that takes much to compile or to follow."""
    size = draw.choice([2, 10, 60, 300, 1000])
    nested: dict[str, Any] = {"type": "null"}
    for _ in range(min(size, 300)):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    texts = [f"{number:x}" for number in range(size)]
    integers = [{"type": "integer", "multipleOf": 2 + each} for each in range(size)]
    strings = [{"type": "string", "pattern": f"a{{{each}}}.*b"} for each in range(size)]
    return draw.choice(
        [
            nested,
            {"enum": texts},
            {"allOf": integers},
            {"allOf": strings},
            {"oneOf": strings},
            {"anyOf": [{"const": each} for each in texts]},
            {"type": "string", "minLength": size, "maxLength": 10 * size},
            {"type": "array", "items": {"$ref": "#"}, "minItems": size},
            {"type": "array", "items": {"type": "integer"}, "minItems": size, "uniqueItems": True},
            {"type": "object", "properties": {each: {} for each in texts}, "required": texts},
            {"type": "object", "properties": {each: {} for each in texts}},
            {"type": "object", "patternProperties": {f"^{each}": {} for each in texts}},
            {"type": "object", "minProperties": size},
            {"type": "number", "minimum": 0.1**size, "maximum": 10.0 ** min(size, 300)},
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "$ref": "#/$defs/a",
            },
            {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        ]
    )


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw.choice(_TYPES)} if draw.random() < 0.9 else {}
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        name, value = _keyword(draw, depth)
        schema[name] = draw.choice(_ODD) if draw.random() < 0.05 else value
    return schema


def _keyword(draw: random.Random, depth: int) -> tuple[str, Any]:
    """Return a keyword and its value, which has schemas of its own unless `depth` is 0."""
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    counts = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    plain = (
        (draw.choice(limits), draw.choice(_NUMBERS)),
        (draw.choice(counts), draw.choice(_COUNTS)),
        ("pattern", draw.choice(_PATTERNS)),
        ("format", draw.choice(_FORMATS)),
        ("enum", [draw.choice((*_NUMBERS, *_NAMES, *_ODD)) for _ in range(draw.randrange(4))]),
        ("const", draw.choice((*_NUMBERS, *_NAMES))),
        ("required", [draw.choice(_NAMES) for _ in range(draw.randrange(3))]),
        ("uniqueItems", True),
        ("$ref", draw.choice(_REFS)),
        ("x-unknown", 1),
    )
    if not depth or draw.random() < 0.6:
        return draw.choice(plain)
    one = _schema(draw, depth - 1)
    some = [_schema(draw, depth - 1) for _ in range(draw.randrange(4))]
    return draw.choice(
        (
            ("items", one),
            ("prefixItems", some),
            ("properties", {draw.choice(_NAMES): each for each in some}),
            ("additionalProperties", draw.choice([one, False, True])),
            ("patternProperties", {draw.choice(_PATTERNS): each for each in some}),
            ("propertyNames", one),
            ("contains", one),
            (draw.choice(["anyOf", "oneOf", "allOf"]), some),
            ("not", one),
            ("if", one),
        )
    )
