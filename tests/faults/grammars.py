"""Regular expressions and Lark grammars: good ones, damaged ones, and hostile ones."""

from __future__ import annotations

import json
import random
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


def hostile(draw: random.Random) -> tuple[str, str]:
    """Return a grammar that is small, or just allowed, and that takes much to compile or to follow."""
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
    """Return a text with some pieces put in, left out, doubled or exchanged."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        begin = draw.randrange(len(text) + 1)
        end = min(len(text), begin + draw.choice([0, 1, 3, 10]))
        middle = draw.choice(
            ["", draw.choice(_PIECES), text[begin:end] * 2, draw.choice(_PIECES) * 50]
        )
        text = text[:begin] + middle + text[end:]
    return text


def any_grammar(draw: random.Random) -> tuple[str, str]:
    """Return a grammar's kind, `regex` or `grammar`, and its text."""
    chance = draw.random()
    if chance < 0.3:
        return hostile(draw)
    kind, known = draw.choice([("regex", REGEXES), ("grammar", LARKS)])
    text = draw.choice(known)
    return kind, text if chance < 0.45 else damaged(draw, text)


def spec(draw: random.Random) -> dict[str, Any]:
    """Return a grammar as `response_format` takes it, and as the tensor does."""
    kind, text = any_grammar(draw)
    return {"type": kind, kind: text}


def tensor(draw: random.Random) -> bytes:
    """Return a grammar as the tensor's bytes."""
    return json.dumps(spec(draw)).encode()
