"""Regular expressions, Lark grammars and JSON schemas: good ones, damaged ones, and hostile ones.

`python -m tests.faults.grammars --count 4000 --seed 1` compiles some, without a server, over 262,144
made-up tokens. It fails for anything but a grammar or a message, and prints what took longest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from typing import Any

from bench.vocabulary import SIZE, large_tokenizer
from canvasrt.containers.triton.preparing import STACK
from canvasrt.containers.triton.trial_process import fork, verdict_of
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from tests.faults.schemas import any_schema

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
    """Return a grammar as the tensor takes it."""
    if draw.random() < 0.4:
        return {"type": "json_schema", "schema": any_schema(draw)}
    kind, text = any_grammar(draw)
    return {"type": kind, kind: text}


def response_format(draw: random.Random) -> dict[str, Any]:
    """Return a grammar as a chat takes it."""
    found = spec(draw)
    if "schema" in found:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": found["schema"]}}
    return found


def tensor(draw: random.Random) -> bytes:
    """Return a grammar as the tensor's bytes."""
    return json.dumps(spec(draw)).encode()


class Compiling:
    """Compiles grammars, and notes how long each took and how long no other thread ran."""

    def __init__(self, count: int, seed: int) -> None:
        self.taken: list[tuple[float, str]] = []  # CPU seconds
        self.tried: list[float] = []  # seconds, in a process of its own
        self.verdicts = Counter[str]()
        self.longest_hold = 0.0
        self.error: BaseException | None = None
        self._count, self._draw = count, random.Random(seed)
        self._words = Vocabulary(large_tokenizer(), SIZE, (1, 3))

    def run(self) -> None:
        """Compile them all on a thread like the server's."""
        before = threading.stack_size(STACK)
        thread = threading.Thread(target=self._compile)
        thread.start()
        threading.stack_size(before)
        while thread.is_alive():
            begin = time.monotonic()
            time.sleep(0.001)
            self.longest_hold = max(self.longest_hold, time.monotonic() - begin)
        if self.error is not None:
            raise self.error

    def _compile(self) -> None:
        try:
            for _ in range(self._count):
                grammar, started = spec(self._draw), time.monotonic()
                verdict = _tried(grammar, self._words)
                self.tried.append(time.monotonic() - started)
                self.verdicts[_kind(verdict)] += 1
                begin = time.thread_time()
                if not verdict:
                    compile_grammar(grammar, self._words, "grammar")
                self.taken.append((time.thread_time() - begin, json.dumps(grammar)[:100]))
        except BaseException as error:
            self.error = error


def _tried(grammar: dict[str, Any], words: Vocabulary) -> dict[str, str]:
    """Return the verdict on a grammar from a process of its own."""
    read, write = os.pipe()
    child = fork(grammar, words, 0, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(told)["verdict"] if told else verdict_of(status)


def _kind(verdict: dict[str, str]) -> str:
    """Return how a trial ended."""
    ends = ("CPU time", "of memory")
    return next((each for each in ends if each in verdict.get("message", "")), "") or (
        "refused" if verdict else "compiled"
    )


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    compiling = Compiling(given.count, given.seed)
    compiling.run()
    taken = sorted(compiling.taken, reverse=True)
    print(f"{len(taken)} grammars: {dict(compiling.verdicts)}")
    print(f"median of a trial {statistics.median(compiling.tried) * 1e3:.1f} ms")
    print(f"no other thread ran for {compiling.longest_hold * 1e3:.0f} ms at most")
    print(f"median {taken[len(taken) // 2][0] * 1e3:.1f} ms of CPU, the longest:")
    for seconds, text in taken[:5]:
        print(f"{seconds:.2f} s: {text}")


if __name__ == "__main__":
    main()
