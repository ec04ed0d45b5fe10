"""Measures how long answers take beside attackers: `python -m tests.faults.neighbours HOST:PORT`, a server of the demo.

Prints the median and the maximum, in milliseconds, of plain answers and of those that follow `[0-9]{2}`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

from tests.faults.grammars import LETTERS, slow_grammar
from tests.helpers.serving_process import call, chat

SECONDS = 5.0  # per figure
DIGITS = {"response_format": {"type": "regex", "regex": "[0-9]{2}"}}


def main(host: str) -> None:
    """Print a row per attack."""
    bias = {
        str(
            call(host, "/tokenize", {"prompt": letter, "add_special_tokens": False}).body["tokens"][
                0
            ]
        ): 100 - place % 3
        for place, letter in enumerate(LETTERS)
    }
    slow = {"max_tokens": 180, "max_denoising_steps": 1, "logit_bias": bias}
    brackets = b"[" * 101 + b"]" * 15_000_000
    attacks: list[tuple[str, int, Callable[[int], bytes]]] = [
        ("none", 0, lambda n: b""),
        *(
            ("a slow grammar", each, lambda n: _chat(_lark(slow_grammar()), **slow))
            for each in (1, 2, 4)
        ),
        (
            "a new slow grammar each time",
            4,
            lambda n: _chat(_lark(f"{slow_grammar()}\n// {n}"), **slow),
        ),
        ("a new 60 KB enum each time", 4, lambda n: _chat(_enum(n, 3500))),
        ("an enum of 14 MB", 4, lambda n: _chat(_enum(0, 900_000))),
        (
            "a prompt of 5 million lists",
            4,
            lambda n: b'{"model":"canvasrt","prompt":[%s[]]}' % (b"[]," * 5_200_000),
        ),
        ("15 million closing brackets", 4, lambda n: brackets),
        ("3 MB of <unk>", 4, lambda n: _chat({}, "<unk>" * 600_000)),
    ]
    print("| attack | attackers | plain | digits |\n| --- | --- | --- | --- |")
    for name, attackers, body in attacks:
        plain, digits = (_beside(host, attackers, body, each) for each in ({}, DIGITS))
        print(f"| {name} | {attackers} | {plain} | {digits} |", flush=True)


def _chat(format: dict[str, Any], content: str = "12+34=", **options: Any) -> bytes:
    given = {"response_format": format} if format else {}
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "canvasrt", "messages": messages, **given, **options}).encode()


def _lark(grammar: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": grammar}


def _enum(seed: int, size: int) -> dict[str, Any]:
    schema = {"enum": [f"{seed:04}{each:08}" for each in range(size)]}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _beside(
    host: str, attackers: int, body: Callable[[int], bytes], options: dict[str, Any]
) -> str:
    """Return the median and the maximum of answers, from the attack's second second on."""
    done, numbers = threading.Event(), count()
    sent = [body(0)] if body(0) == body(1) else []  # made once, since making it is work, too

    def attack() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                call(
                    host,
                    "/v1/chat/completions",
                    sent[0] if sent else body(next(numbers)),
                    timeout=10,
                )

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(attackers)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    found: list[float] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or len(found) < 5:
        begin = time.monotonic()
        assert (
            chat(host, max_tokens=40, max_denoising_steps=6, seed=len(found), **options).status
            == 200
        )
        found.append(1000 * (time.monotonic() - begin))
    done.set()
    for thread in threads:
        thread.join()
    return f"{median(found):.0f}, {max(found):.0f}"


if __name__ == "__main__":
    main(sys.argv[1])
