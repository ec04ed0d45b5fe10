"""Compiles each grammar in a process of its own first, which can be ended when it takes too much.

llguidance cannot be stopped from outside, and some short grammars take it hours, or all memory.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from canvasrt.errors import CanvasError

log = logging.getLogger(__name__)

_MODULE = "canvasrt.containers.triton.trial_process"
_PATIENCE = 20.0  # seconds for a verdict: the first waits for the vocabulary
# Nothing else of the server's environment is for a process that reads callers' input.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "HOME")


class Trials:
    """The process in which the grammars of one model are tried. It forks one for each."""

    def __init__(self, bundle: Path, size: int, ends: Iterable[int]) -> None:
        """Start it; reading the vocabulary of `size` tokens takes it seconds."""
        model = {"bundle": str(bundle), "size": size, "ends": list(ends), "parent": os.getpid()}
        self._model = json.dumps(model)
        self._lock = threading.Lock()
        self._process = self._start()

    def check(self, spec: Mapping[str, Any], control: Iterable[int]) -> None:
        """Raise CanvasError for a grammar that is refused, or that takes more than the limits."""
        with self._lock:
            try:
                verdict = self._ask(spec, control)
            except OSError:  # somebody has ended or stopped it
                log.warning("the process that tries grammars does not answer: replacing it")
                self._finalizer()
                self._process = self._start()
                verdict = self._ask(spec, control)
        if verdict:
            raise CanvasError(verdict["message"], verdict["hint"])

    def _ask(self, spec: Mapping[str, Any], control: Iterable[int]) -> dict[str, str]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"spec": spec, "control": sorted(control)}).encode() + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], _PATIENCE)[0]:
            raise TimeoutError
        if not (line := stdout.readline()):
            raise BrokenPipeError
        return json.loads(line)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        process = subprocess.Popen(
            [_interpreter(), "-m", _MODULE, self._model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._finalizer = weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _interpreter() -> str:
    """Return the path of Python. Where it is embedded, `sys.executable` may be another program."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    known = (sys.executable, f"{sys.exec_prefix}/bin/{name}", shutil.which(name))
    for path in known:
        if path and Path(path).name.startswith("python") and Path(path).is_file():
            return path
    raise CanvasError(
        f"there is no {name} to try grammars with, in {sys.exec_prefix}/bin or on PATH",
        "install it in the image",
    )
