"""Compiles grammars in forks with resource limits: `python -m canvasrt.containers.triton.sandbox_process MODEL`.

MODEL is JSON: a bundle, the size of its vocabulary, the tokens that end an answer, and the parent's process id; this
process exits when its parent does. An input line has a grammar, its control tokens and its number. An output line has
the number and the verdict: `{}`, or a message and a hint.
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

TRIAL_SECONDS = 1.0  # maximum CPU time
TRIAL_BYTES = 1 << 30
# Maximum characters of a message, because only lines of at most 4096 bytes are written atomically.
_LONGEST = 300
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Write `{}` after loading, then answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to all processes
    given = json.loads(sys.argv[1])
    if not signal_at_death_of(given["parent"], signal.SIGKILL):
        return
    tokenizer = Tokenizer.load(load_bundle(Path(given["bundle"]), check=False))
    vocabulary = Vocabulary(tokenizer, given["size"], tuple(given["ends"]))
    gc.freeze()  # keeps the garbage collector from copying pages that forks share
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[int, int] = {}  # process → number of its grammar
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
    """Fork a process that compiles a grammar and, unless it dies, writes the verdict to `out`.

    Return the process id.
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
    """Write verdicts for forks that died without one."""
    while forks:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        number = forks.pop(child)
        if status:
            _say({"number": number, "verdict": verdict_of(status)})


def verdict_of(status: int) -> dict[str, str]:
    """Return the verdict on a grammar whose process exited with this status."""
    why = f"takes more than {TRIAL_SECONDS:g} s of CPU time to compile"
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGPROF:
        why = (
            f"takes more than {TRIAL_BYTES >> 30} GiB of memory to compile, or crashes the compiler"
        )
    return {"message": f"grammar {why}", "hint": "simplify it"}


def _say(told: dict[str, Any], out: int = 1) -> None:
    """Write a line atomically, because all forks write to the same pipe."""
    os.write(out, json.dumps(told).encode() + b"\n")


def tried(spec: dict[str, Any], vocabulary: Vocabulary) -> dict[str, str] | None:
    """Compile a grammar under limits, which remain set for this process. Return the verdict, or None if memory ran
    out or the compiler panicked."""
    _limit()
    found: list[dict[str, str]] = []
    threading.stack_size(STACK)  # the same stack size as in the server
    thread = threading.Thread(target=_try, args=(spec, vocabulary, found))
    thread.start()
    thread.join()
    return found[0] if found else None


def _limit() -> None:
    """Limit this process's resources. SIGPROF ends the process when its CPU time is used up."""
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
    except BaseException:  # out of memory, or a panic of the compiler
        return


if __name__ == "__main__":
    main()
