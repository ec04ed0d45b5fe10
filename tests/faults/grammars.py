"""Random regular expressions, Lark grammars and JSON schemas: good, damaged, and hostile ones, and schemas with invalid
values."""

from __future__ import annotations

import json
import random
from itertools import combinations
from string import ascii_lowercase, digits
from typing import Any

REGEXES = (
    r"[0-9]{2}",
    r"(yes|no)( maybe)?",
    r"[a-z]+ = -?\d{1,3}(\.\d+)?",
    r"\w{3}\s\S",
    r"(?i:abc)|[^x-z]{2,4}",
    r"\{\"a\": (true|false|null)\}",
    r"é{1,3}|\u00e9|[\p{L}&&\p{Lu}]",
)
LARKS = (
    'start: "yes" | "no"\n',
    'start: item ("," item)*\nitem: NUMBER | WORD\nNUMBER: /[0-9]+/\nWORD: /[a-z]{1,4}/\n',
    'start: expr\nexpr: term (("+" | "-") term)*\nterm: "(" expr ")" | /[0-9]{1,2}/\n',
    'start: a~2..4 b?\na: "x"i\nb: A\nA: "q" ".." "z"\n',
    'start: object\nobject: %json {"type": "object", "properties": {"a": {"type": "null"}}}\n',
    'start: "a" TEXT "b"\nTEXT[max_tokens=3]: /.*/\n%ignore / +/\n',
    "start: x\nx[lazy]: /[^.]*\\./\n",
)
_PIECES = (
    *("(", ")", "[", "]", "{", "}", "|", "*", "+", "?", "^", "$", ".", "\\", "/", '"', "\n", " "),
    *(
        "{0}",
        "{2,1}",
        "{1,99999}",
        "{,}",
        "(?=a)",
        "(?<!b)",
        "(?P<n>a)",
        r"\1",
        r"\b",
        r"\x",
        r"\u",
    ),
    *(r"\p{Nope}", "[^]", "[z-a]", "&", "~", "~3", "~1..0", "start: start\n", ": ", "a: a | a a\n"),
    *("%import common.WORD\n", "%ignore", "%json {", "%regex {", "[max_tokens=0]", '[stop=""]'),
    *("\x00", "\u202e", "\U0001f600", "é", "/x/i", '""', "//", "#", "<[1]>", "<|turn>", "@", "->"),
)

LETTERS, LONG = ascii_lowercase[:20], 100


def slow_grammar() -> str:
    """Return a grammar of 7 KB: letters, and an ending that depends on the last letter. Both parts are ambiguous, so
    parsing them is slow."""
    rules = [
        "start: " + " | ".join(f"any x{c}" for c in LETTERS),
        "any: | any any | L",
        "L: /[a-z]/",
    ]
    for letter, pair in zip(LETTERS, combinations(digits, 2), strict=False):
        rules.append(f'x{letter}: "{letter}" ' + f"d{letter} " * LONG)
        rules.append(f"d{letter}: D{letter.upper()} | d{letter} d{letter}")
        rules.append(f"D{letter.upper()}: /[{''.join(pair)}]/")
    return "\n".join(rules)


def hostile(draw: random.Random) -> tuple[str, str]:
    """Return a grammar within the limits that is costly to compile or to follow."""
    size = draw.choice([2, 10, 100, 1000, 4000])
    chain = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(min(size, 400)))
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(min(size, 1200)))
    regexes = (
        "(" * size + "a" + ")" * size,
        "(a" * size + ")*" * size,
        "a?" * size + "a" * size,
        "|".join(f"{i:x}" for i in range(size)),
        f"(a{{1,{size}}}){{1,{size}}}",
        "(a|aa)+" * min(size, 500),
        "(.*a.*b.*c)" * min(size, 300),
        rf"[\p{{L}}]{{{size}}}",
        f"(a|b)*a(a|b){{{size}}}",
        "(?:" * min(size, 1000) + "x" + "?)" * min(size, 1000),
        "[^a]*" * min(size, 1000),
    )
    larks = (
        "start: r0\n" + rules + f'r{min(size, 1200)}: "a"\n',
        "start: r0\n" + chain + f'r{min(size, 400)}: "a"\n',
        "start: start start | \n",
        'start: "a" start "b" | "c"\n',
        "start: x\nx: x x | x | /a*/\n",
        f"start: a~{size}..{10 * size}\na: /(a|b)*/\n",
        "start: " + " | ".join(f'"{i}"' for i in range(min(size, 1500))) + "\n",
        "start: /" + "(a|b)*" * min(size, 1000) + "/\n",
        "start: (" * min(size, 1500) + '"a"' + ")*" * min(size, 1500) + "\n",
        "start: A\n" + "A: B\nB: A\n",
    )
    if draw.random() < 0.5:
        return "regex", draw.choice(regexes)
    return "grammar", draw.choice(larks)


def damaged(draw: random.Random, text: str) -> str:
    """Insert, remove, double or swap some pieces of a text."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        begin = draw.randrange(len(text) + 1)
        end = min(len(text), begin + draw.choice([0, 1, 3, 10]))
        middle = draw.choice(
            ["", draw.choice(_PIECES), text[begin:end] * 2, draw.choice(_PIECES) * 50]
        )
        text = text[:begin] + middle + text[end:]
    return text


def any_grammar(draw: random.Random) -> tuple[str, str]:
    """Return the kind of a random grammar, `regex` or `grammar`, and its text."""
    chance = draw.random()
    if chance < 0.3:
        return hostile(draw)
    kind, known = draw.choice([("regex", REGEXES), ("grammar", LARKS)])
    text = draw.choice(known)
    return kind, text if chance < 0.45 else damaged(draw, text)


def spec(draw: random.Random) -> dict[str, Any]:
    """Return a random grammar in the form of Triton's tensor."""
    if draw.random() < 0.4:
        return {"type": "json_schema", "schema": any_schema(draw)}
    kind, text = any_grammar(draw)
    return {"type": kind, kind: text}


def response_format(draw: random.Random) -> dict[str, Any]:
    """Return a random grammar in the form of a chat's `response_format`."""
    found = spec(draw)
    if "schema" in found:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": found["schema"]}}
    return found


def tensor(draw: random.Random) -> bytes:
    """Return a random grammar as the bytes of Triton's tensor."""
    return json.dumps(spec(draw)).encode()


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
    """Return a random schema. Some are true or false, and some are not valid schemas."""
    chance = draw.random()
    if chance < 0.2:
        return _hostile_schema(draw)
    schema = _schema(draw, 3)
    if chance < 0.6:
        schema["$defs"] = {name: _schema(draw, 2) for name in ("a", "b")}
    return schema


def _hostile_schema(draw: random.Random) -> dict[str, Any]:
    """Return a schema within the limits that is costly to compile or to follow."""
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
    """Return a keyword and its value, which contains schemas unless `depth` is 0."""
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
