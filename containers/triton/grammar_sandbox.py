"""Tries to compile every grammar in a separate process first, because a process can be killed.

llguidance cannot be interrupted, and some short grammars take hours or all memory.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from canvasrt.errors import CanvasError, EngineError

log = logging.getLogger(__name__)

_MODULE = "canvasrt.containers.triton.sandbox_process"
_LOADING = 300.0  # seconds to load the vocabulary
_PATIENCE = 30.0  # seconds for a verdict, which takes at most one second of CPU time
_WRITTEN = 4096  # number of bytes that a writable pipe accepts without blocking
# Environment variables to pass on. The process reads callers' input, and other variables could contain secrets.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "HOME")


class GrammarSandbox:
    """The process that first compiles the grammars of one model, as a trial. It forks once per grammar. Thread-safe."""

    def __init__(self, bundle: Path, size: int, ends: Iterable[int]) -> None:
        """Start the process, which takes seconds to load the vocabulary of `size` tokens."""
        model = {"bundle": str(bundle), "size": size, "ends": list(ends), "parent": os.getpid()}
        self._model = json.dumps(model)
        self._lock = threading.Lock()
        self._running = _Running(self._model)
        self._finalizer = weakref.finalize(self, self._running.end)

    def check(self, spec: Mapping[str, Any], control: Iterable[int]) -> None:
        """Raise CanvasError for a grammar that is invalid or exceeds the limits."""
        asked = {"spec": spec, "control": sorted(control)}
        for _ in range(2):
            running = self._running
            try:
                verdict = running.ask(asked)
            except OSError:  # the process was killed or stopped
                self._replace(running)
                continue
            if verdict:
                raise CanvasError(verdict["message"], verdict["hint"])
            return
        raise EngineError("the process that tries grammars does not answer", "ask again later")

    @property
    def pid(self) -> int:
        """The process's current id, which changes when the process is replaced."""
        return self._running.process.pid

    def _replace(self, failed: _Running) -> None:
        with self._lock:
            if self._running is not failed:  # another thread has replaced the process
                return
            log.warning("the process that tries grammars does not answer: replacing it")
            self._finalizer()
            self._running = _Running(self._model)
            self._finalizer = weakref.finalize(self, self._running.end)


class _Running:
    """One process, and a thread that delivers its verdicts."""

    def __init__(self, model: str) -> None:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.process = subprocess.Popen(
            [_interpreter(), "-m", _MODULE, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._asked: dict[int, Future[dict[str, str]]] = {}
        self._loaded: Future[None] = Future()
        self._ended = False
        threading.Thread(target=self._read, name="canvasrt-sandbox", daemon=True).start()

    def ask(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """Return the verdict. Raises OSError if the process dies, and TimeoutError if the verdict takes too long."""
        self._loaded.result(_LOADING)
        number, future = next(self._numbers), Future[dict[str, str]]()
        line = json.dumps({**asked, "number": number}).encode() + b"\n"
        with self._lock:
            if self._ended:
                raise BrokenPipeError
            self._asked[number] = future
            self._send(line)
        return future.result(_PATIENCE)

    def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        while line:
            if not select.select([], [self.process.stdin], [], _PATIENCE)[1]:
                raise TimeoutError
            line = line[self.process.stdin.write(line[:_WRITTEN]) :]

    def end(self) -> None:
        """Kill the process; its forks exit with it."""
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with io.BufferedReader(cast(io.RawIOBase, self.process.stdout)) as lines:
            for line in lines:
                told = json.loads(line)
                if "number" in told:
                    self._asked.pop(told["number"]).set_result(told["verdict"])
                else:
                    self._loaded.set_result(None)
        ended = BrokenPipeError()
        with self._lock:
            self._ended = True
            if not self._loaded.done():
                self._loaded.set_exception(ended)
            for future in self._asked.values():
                future.set_exception(ended)


def _interpreter() -> str:
    """Return the path of Python. In an embedded interpreter, `sys.executable` can be another program."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    known = (sys.executable, f"{sys.exec_prefix}/bin/{name}", shutil.which(name))
    for path in known:
        if path and Path(path).name.startswith("python") and Path(path).is_file():
            return path
    raise CanvasError(
        f"{name}, which tries grammars, is neither in {sys.exec_prefix}/bin nor on PATH",
        "add it to the image",
    )
