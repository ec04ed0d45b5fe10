"""Tries grammars, each in a fork with limits: `python -m canvasrt.containers.triton.trial_process MODEL`.

MODEL is JSON: a bundle, the size of its vocabulary, the tokens that end an answer, and the process to end with. Each
line of the input is a grammar, and each line of the output a verdict: `{}`, or a message and a hint.
"""

from __future__ import annotations

import gc
import json
import os
import resource
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
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody
    given = json.loads(sys.argv[1])
    if not signal_at_death_of(given["parent"], signal.SIGKILL):
        return
    tokenizer = Tokenizer.load(load_bundle(Path(given["bundle"]), check=False))
    vocabulary = Vocabulary(tokenizer, given["size"], tuple(given["ends"]))
    gc.freeze()  # so that forks share these pages
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        verdict = tried(asked["spec"], vocabulary.with_control(frozenset(asked["control"])))
        sys.stdout.buffer.write(verdict + b"\n")
        sys.stdout.buffer.flush()


def tried(spec: dict[str, Any], vocabulary: Vocabulary) -> bytes:
    """Return the verdict, as JSON, on a grammar."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _limit()
        threading.stack_size(STACK)  # as the server has
        thread = threading.Thread(target=_try, args=(spec, vocabulary, write))
        thread.start()
        thread.join()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        verdict = pipe.read()
    _, status = os.waitpid(child, 0)
    if verdict:
        return verdict
    why = f"takes more than {TRIAL_SECONDS:g} s of CPU time to compile"
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGPROF:
        why = f"takes more than {TRIAL_BYTES >> 30} GiB of memory to compile, or ends the compiler"
    return _refusal(f"grammar {why}", "simplify it")


def _limit() -> None:
    """Bound what this process may take. Past its time it gets SIGPROF, which ends it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * _PAGE + STACK + TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)


def _try(spec: dict[str, Any], vocabulary: Vocabulary, write: int) -> None:
    try:
        compile_grammar(spec, vocabulary, "grammar")
        verdict = b"{}"
    except CanvasError as error:
        verdict = _refusal(error.message, error.hint)
    except BaseException:  # no memory, or a panic
        return
    os.write(write, verdict)


def _refusal(message: str, hint: str) -> bytes:
    return json.dumps({"message": message, "hint": hint}).encode()


if __name__ == "__main__":
    main()
