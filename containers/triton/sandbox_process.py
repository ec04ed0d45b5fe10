"""Tries grammars, each in a fork with limits: `python -m canvasrt.containers.triton.sandbox_process MODEL`.

MODEL is JSON: a bundle, the size of its vocabulary, the tokens that end an answer, and the process to end with. Each
line of the input is a grammar and its number. Each line of the output is a number and its verdict: `{}`, or a message
and a hint.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from canvasrt.bundle import load_bundle
from canvasrt.children import signal_at_death_of
from canvasrt.containers.triton.preparing import STACK
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.tokenizer import Tokenizer

TRIAL_SECONDS = 1.0  # of CPU time
TRIAL_BYTES = 1 << 30
_LONGEST = 300  # characters of a message: a line of at most 4096 bytes is written at once
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Write `{}` once loaded, then answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody
    given = json.loads(sys.argv[1])
    if not signal_at_death_of(given["parent"], signal.SIGKILL):
        return
    tokenizer = Tokenizer.load(load_bundle(Path(given["bundle"]), check=False))
    vocabulary = Vocabulary(tokenizer, given["size"], tuple(given["ends"]))
    gc.freeze()  # so that forks share these pages
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[int, int] = {}  # numbers of grammars, by process
    _say({})
    unread = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 1024)
            _reap(forks)
        if 0 in ready:
            if not (data := os.read(0, 1 << 16)):
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                allowed = vocabulary.with_control(frozenset(asked["control"]))
                forks[fork(asked["spec"], allowed, asked["number"])] = asked["number"]


def fork(spec: dict[str, Any], vocabulary: Vocabulary, number: int, out: int = 1) -> int:
    """Start a process that compiles a grammar, and writes its verdict to `out` if it gets that far.

    Return its id.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    verdict = None
    if signal_at_death_of(parent, signal.SIGKILL):
        verdict = tried(spec, vocabulary)
    if verdict is not None:
        _say({"number": number, "verdict": verdict}, out)
    os._exit(0 if verdict is not None else 1)


def _reap(forks: dict[int, int]) -> None:
    """Say what became of forks that ended without a verdict."""
    while forks:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        number = forks.pop(child)
        if status:
            _say({"number": number, "verdict": verdict_of(status)})


def verdict_of(status: int) -> dict[str, str]:
    """Return the verdict on a grammar whose process ended so, without one."""
    why = f"takes more than {TRIAL_SECONDS:g} s of CPU time to compile"
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGPROF:
        why = f"takes more than {TRIAL_BYTES >> 30} GiB of memory to compile, or ends the compiler"
    return {"message": f"grammar {why}", "hint": "simplify it"}


def _say(told: dict[str, Any], out: int = 1) -> None:
    """Write a line at once: forks write to the same pipe."""
    os.write(out, json.dumps(told).encode() + b"\n")


def tried(spec: dict[str, Any], vocabulary: Vocabulary) -> dict[str, str] | None:
    """Return the verdict on a grammar, under limits that stay with this process; None if it has none,
    because memory ran out or the compiler panicked."""
    _limit()
    found: list[dict[str, str]] = []
    threading.stack_size(STACK)  # as the server has
    thread = threading.Thread(target=_try, args=(spec, vocabulary, found))
    thread.start()
    thread.join()
    return found[0] if found else None


def _limit() -> None:
    """Limit this process's resources. Past its time it gets SIGPROF, which ends it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * _PAGE + STACK + TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)


def _try(spec: dict[str, Any], vocabulary: Vocabulary, found: list[dict[str, str]]) -> None:
    try:
        compile_grammar(spec, vocabulary, "grammar")
        found.append({})
    except CanvasError as error:
        found.append({"message": error.message[:_LONGEST], "hint": error.hint[:_LONGEST]})
    except BaseException:  # no memory, or a panic
        return


if __name__ == "__main__":
    main()
