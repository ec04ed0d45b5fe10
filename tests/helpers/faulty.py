"""A package whose engines fail on demand. A file names the fault of the following passes.

The engines, the server and the supervisor are real. Only passes are made to fail, or tasks on other threads to hang.
"""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt.bundle import MANIFEST, Bundle, _digest
from canvasrt.hashes import canonical, hash_files
from tests.helpers.serving_process import Serving, call

# Options of a request whose grammar is prepared on a separate thread.
DIGITS: dict[str, Any] = {"response_format": {"type": "regex", "regex": "[0-9]{2}"}}
_MODEL = '''
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from canvasrt.containers.triton import backend
from canvasrt.containers.triton.backend import StreamModel as TritonPythonModel
from canvasrt.runtime.answers import constrained
from canvasrt.runtime.backends.cuda import CudaDevice
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model

SWITCH = Path({switch!r})
RESTART = {restart!r}


def fault():
    try:
        return SWITCH.read_text()
    except OSError:
        return ""


def cuda():
    """A call that CUDA answers with 700, cudaErrorIllegalAddress."""
    device = CudaDevice.__new__(CudaDevice)
    device._runtime = SimpleNamespace(
        cudaError_t=int,
        cudaStreamSynchronize=lambda stream: (700,),
        cudaGetErrorString=lambda status: (0, b"an illegal memory access was encountered"),
    )
    device._number = device.stream = 0
    device._busy = []
    device.synchronize()


def denoise_each(self, inputs, count):
    kind = fault() if count else ""
    if kind == "cuda":
        cuda()
    if kind == "fail":
        raise RuntimeError("the pass failed on purpose")
    if kind == "once":
        SWITCH.write_text("unmakeable" if RESTART else "")
        raise RuntimeError("the pass failed on purpose")
    while kind == "hang":
        time.sleep(0.05)
        kind = fault()
    outputs = list(real(self, inputs, count))
    if kind == "nan":
        for output in outputs:
            output.entropy[3] = np.nan
    yield from outputs


def make(self, *arguments, **options):
    if fault() == "unmakeable":
        raise RuntimeError("no new generator on purpose")
    init(self, *arguments, **options)


def waits(name, function):
    """Hold a function up while its name is in the switch, or for the seconds behind it."""

    def held(*arguments, **named):
        begin = time.monotonic()
        while fault().partition(" ")[0] == name:
            seconds = float(fault().partition(" ")[2] or "inf")
            if time.monotonic() - begin > seconds:
                break
            time.sleep(0.02)
        return function(*arguments, **named)

    return held


real = Model.denoise_each
Model.denoise_each = denoise_each
backend.read_request = waits("read", backend.read_request)
constrained.search = waits("search", constrained.search)
if RESTART:
    init = Generator.__init__
    Generator.__init__ = make
'''


@dataclass(frozen=True)
class Faulty:
    """The package, and the file that switches its faults."""

    path: Path
    switch: Path

    def set(self, fault: str) -> None:
        """Choose the fault of the following passes: `cuda`, `fail`, `once`, `hang`, `nan`, or an empty text. `read` and
        `search` make a task on another thread hang instead; `read 2` makes it take two seconds."""
        fresh = self.switch.with_suffix(".new")
        fresh.write_text(fault)
        fresh.replace(self.switch)


def faulty_package(packaged: Bundle, folder: Path, restart: bool = False) -> Faulty:
    """Copy a package into `folder`. With `restart`, the fault `once` also fails the generator that replaces the
    first."""
    folder.mkdir(parents=True, exist_ok=True)
    copy, switch = folder / "package", folder / "fault"
    shutil.copytree(packaged.path, copy, symlinks=True)
    write_model(copy, _MODEL.format(switch=str(switch), restart=restart))
    return Faulty(copy, switch)


def write_model(package: Path, text: str) -> None:
    """Replace the Python code that Triton runs for a package's model."""
    model = package / "models" / "canvasrt_stream" / "1" / "model.py"
    model.write_text(text)
    data = json.loads((package / MANIFEST).read_text())
    name = str(model.relative_to(package))
    data["files"][name] = {
        "sha256": hash_files(package, [name])[name],
        "bytes": model.stat().st_size,
    }
    del data["digest"]
    data["digest"] = _digest(data)
    (package / MANIFEST).write_text(canonical(data), encoding="utf-8")


class Watch:
    """Calls both health routes until the server is gone, and records the statuses."""

    def __init__(self, running: Serving) -> None:
        self.seen: dict[str, list[int]] = {"live": [], "ready": []}
        self._running = running
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in self.seen]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str) -> None:
        while True:
            try:
                self.seen[name].append(call(self._running.host, f"/v1/health/{name}")[0])
            except (OSError, http.client.HTTPException):
                return
            time.sleep(0.02)

    def ends(self, code: int, *says: str) -> None:
        """Check that the server reports itself unhealthy, ends by itself with this exit code and these messages, and
        leaves nothing."""
        errors = self._running.process.communicate(timeout=120)[1]
        assert self._running.process.returncode == code
        assert all(each in errors for each in says), errors
        assert not self._running.stale()
        assert not self._running.scratch()
        for thread in self._threads:
            thread.join(60)
        assert all(503 in seen for seen in self.seen.values())
