"""Measures how long answers take during attacks: `python -m tests.faults.neighbours HOST:PORT`, with a server of the
demo.

Prints the median and the maximum, in milliseconds, of plain answers and of answers that follow `[0-9]{2}`. Then it
prints both while the same attackers send to a process that only reads. The latter shows how much the attackers' own
work slows this machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from typing import Any

from tests.faults.grammars import LETTERS, slow_grammar
from tests.helpers.serving_process import call, chat

SECONDS = 4.0  # of measuring per figure
DIGITS: dict[str, Any] = {"response_format": {"type": "regex", "regex": "[0-9]{2}"}}
_ECHO = b',"echo":true,"logprobs":20,"max_tokens":1'
_processes = multiprocessing.get_context("fork")
Body = Callable[[int], bytes]


def main(host: str, only: str = "") -> None:
    """Print a row per attack whose name contains `only`."""
    bias = {
        str(
            call(host, "/tokenize", {"prompt": letter, "add_special_tokens": False}).body["tokens"][
                0
            ]
        ): 100 - place % 3
        for place, letter in enumerate(LETTERS)
    }
    slow = {"max_tokens": 180, "max_denoising_steps": 1, "logit_bias": bias}
    attacks: list[tuple[str, int, Body]] = [
        ("none", 0, lambda n: b""),
        ("ordinary chats", 4, lambda n: _chat({})),
        ("chats under [0-9]{2}", 4, lambda n: _chat(DIGITS["response_format"])),
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
        ("an enum of 8 MB", 4, lambda n: _chat(_enum(0, 500_000))),
        ("an enum of 14 MB", 4, lambda n: _chat(_enum(0, 900_000))),
        ("a prompt of 500,000 ids", 4, lambda n: _prompt(b"1," * 500_000 + b"1")),
        ("a prompt of 5 million lists", 4, lambda n: _prompt(b"[]," * 5_200_000 + b"[]")),
        ("15 million closing brackets", 4, lambda n: b"[" * 101 + b"]" * 15_000_000),
        ("3,800 ids with echo", 4, lambda n: _prompt(b"3," * 3799 + b"3", _ECHO)),
        ("3,800 new ids", 4, lambda n: _prompt(_new(n) + b"3," * 3798 + b"3")),
        ("3,800 new ids with echo", 4, lambda n: _prompt(_new(n) + b"3," * 3798 + b"3", _ECHO)),
        ("other allowed tokens at each place", 4, lambda n: _prompt(b"3", _allowed())),
        ("3 MB of <unk>", 4, lambda n: _chat({}, "<unk>" * 600_000)),
        ("15 MB of text", 4, lambda n: _chat({}, "abc " * 3_750_000)),
    ]
    print(
        "| attack | attackers | plain | digits | plain, reader | digits, reader |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    with _reader() as sink:
        for name, attackers, body in attacks:
            if only in name:
                ways = [(target, options) for target in (host, sink) for options in ({}, DIGITS)]
                found = [_beside(host, to, attackers, body, options) for to, options in ways]
                print(f"| {name} | {attackers} | {' | '.join(found)} |", flush=True)


def _prompt(values: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"canvasrt","prompt":[%s]%s}' % (values, more)


def _new(number: int) -> bytes:
    """Return two token ids with which no earlier prompt began."""
    return b"%d,%d," % (10 + number % 100, 10 + number // 100 % 100)


def _allowed() -> bytes:
    """Return options that allow a different set of tokens at every position of a canvas. All sets have the same
    size."""
    sets = {str(place): [token for token in range(112) if token != place] for place in range(32)}
    options = {"canvas": {"allow": sets}, "max_tokens": 32, "max_denoising_steps": 48}
    return b"," + json.dumps(options)[1:-1].encode()


def _chat(format: dict[str, Any], content: str = "12+34=", **options: Any) -> bytes:
    given = {"response_format": format} if format else {}
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "canvasrt", "messages": messages, **given, **options}).encode()


def _lark(grammar: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": grammar}


def _enum(seed: int, size: int) -> dict[str, Any]:
    schema = {"enum": [f"{seed:04}{each:08}" for each in range(size)]}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


class _Reads(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        length = 0
        while (line := self.rfile.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        while length > 0:
            length -= len(self.rfile.read1(min(length, 1 << 18))) or length
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@contextlib.contextmanager
def _reader() -> Iterator[str]:
    """Run a server that reads requests and refuses them."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Reads) as server:
        server.daemon_threads = True
        process = _processes.Process(target=server.serve_forever, daemon=True)
        process.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        process.terminate()
        process.join()


def _attack(host: str, attackers: int, body: Body) -> None:
    numbers = count()
    sent = [body(0)] if body(0) == body(1) else []  # made once, since making bodies takes time

    def attack() -> None:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                given = sent[0] if sent else body(next(numbers))
                call(
                    host,
                    "/v1/chat/completions" if b'"messages"' in given[:99] else "/v1/completions",
                    given,
                    timeout=10,
                )

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(attackers)]
    for thread in threads:
        thread.start()
    threading.Event().wait()


def _beside(host: str, target: str, attackers: int, body: Body, options: dict[str, Any]) -> str:
    """Return the median and the maximum time of answers, measured from one second after the attack begins."""
    attack = _processes.Process(target=_attack, args=(target, attackers, body), daemon=True)
    attack.start()
    time.sleep(1)
    found: list[float] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or len(found) < 5:
        begin = time.monotonic()
        status = chat(host, max_tokens=40, max_denoising_steps=6, seed=len(found), **options).status
        assert status == 200
        found.append(1000 * (time.monotonic() - begin))
    attack.kill()
    attack.join()
    return f"{median(found):.0f}, {max(found):.0f}"


if __name__ == "__main__":
    main(*sys.argv[1:])
