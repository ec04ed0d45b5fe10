"""The only GPU of a process, a fake one. The product imports it as `tensorrt_rtx`, `tensorrt` and `cuda.bindings`.

`CudaDevice` is the real class, on a fake of CUDA's runtime. The variable `REHEARSAL` names a folder. Its file `fault`
contains the fault to inject, and its file `events` has a line for every event that takes time on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError
from tests.helpers.fake_tensorrt import FakeCudaDevice, IRuntimeCache

FOLDER = Path(os.environ["REHEARSAL"])
COMPILE = float(os.environ.get("REHEARSAL_COMPILE", "0.05"))  # seconds per shape
OUT_OF_MEMORY, ILLEGAL_ADDRESS, INVALIDATED = 2, 700, 901
_TEXTS = {
    OUT_OF_MEMORY: b"out of memory",
    ILLEGAL_ADDRESS: b"an illegal memory access was encountered",
    INVALIDATED: b"operation failed due to a previous error during capture",
}


def fault() -> list[str]:
    """Return the words of the current fault: `memory BYTES`, `capture` or `illegal`."""
    try:
        return (FOLDER / "fault").read_text().split()
    except OSError:
        return []


class Gpu(FakeCudaDevice):
    """A fake device on which compiled kernels take time and disk space, and contexts take memory."""

    capability = (9, 0) if os.environ.get("REHEARSAL_GPU") == "h100" else (12, 0)

    def __init__(self) -> None:
        super().__init__(*map(int, fault()[1:]))
        self.lost = False

    def stall(self, what: str, engine: str, seconds: float) -> None:
        if what == "compile":
            time.sleep(COMPILE)
        super().stall(what, engine, seconds)
        with (FOLDER / "events").open("a") as file:
            file.write(f"{what} {engine} {self.left}\n")

    def begin_capture(self) -> None:
        self._recording = []

    def end_capture(self) -> int:
        found, self._recording = self._recording or [], None
        number = max(self.graphs, default=0) + 1
        self.graphs[number] = found
        return number


GPU = Gpu()
IRuntimeCache.per_shape = int(os.environ.get("REHEARSAL_KERNELS", "0"))


def answers(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Turn a function into a call of CUDA's runtime, which returns its status first. After a fatal error, every call
    returns that error."""

    @wraps(function)
    def call(self: Runtime, *arguments: Any) -> tuple[Any, ...]:
        if GPU.lost:
            return (ILLEGAL_ADDRESS,)
        try:
            found = function(self, *arguments)
        except CanvasError:
            return (OUT_OF_MEMORY,)
        return (0,) if found is None else (0, *(found if isinstance(found, tuple) else (found,)))

    return call


class Runtime:
    """A fake of CUDA's runtime with the interface of `cuda.bindings.runtime`."""

    cudaError_t = int
    cudaStreamNonBlocking = 1
    cudaMemcpyKind = IntEnum(
        "cudaMemcpyKind",
        {
            "cudaMemcpyHostToDevice": 1,
            "cudaMemcpyDeviceToHost": 2,
            "cudaMemcpyDeviceToDevice": 3,
        },
    )
    cudaStreamCaptureMode = IntEnum(
        "cudaStreamCaptureMode", {"cudaStreamCaptureModeThreadLocal": 1}
    )

    def __init__(self) -> None:
        self._host: list[np.ndarray] = []

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, _TEXTS[status]

    @answers
    def cudaGetDeviceCount(self) -> int:
        return 1

    @answers
    def cudaSetDevice(self, number: int) -> None:
        assert number == 0

    @answers
    def cudaGetDeviceProperties(self, number: int) -> Any:
        major, minor = GPU.capability
        return SimpleNamespace(name=b"a fake GPU\0\0", major=major, minor=minor)

    @answers
    def cudaStreamCreateWithFlags(self, flags: int) -> int:
        return GPU.stream

    @answers
    def cudaMalloc(self, size: int) -> int:
        return GPU.allocate(size)

    @answers
    def cudaMallocHost(self, size: int) -> int:
        self._host.append(np.zeros(size, np.uint8))
        return int(self._host[-1].ctypes.data)

    @answers
    def cudaMemGetInfo(self) -> tuple[int, int]:
        return GPU.memory()

    @answers
    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        GPU.queue(lambda: ctypes.memset(address, value, size))

    @answers
    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        GPU.queue(lambda: ctypes.memmove(to, source, size))

    @answers
    def cudaMemcpy2DAsync(
        self,
        to: int,
        pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> None:
        def run() -> None:
            for row in range(height):
                ctypes.memmove(to + row * pitch, source + row * source_pitch, width)

        GPU.queue(run)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        GPU.lost = GPU.lost or fault() == ["illegal"]
        if GPU.lost:
            return (ILLEGAL_ADDRESS,)
        GPU.synchronize()
        return (0,)

    @answers
    def cudaStreamBeginCapture(self, stream: int, mode: int) -> None:
        GPU.begin_capture()

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, int | None]:
        number = GPU.end_capture()
        return (INVALIDATED, None) if fault() == ["capture"] else (0, number)

    @answers
    def cudaGraphInstantiate(self, graph: int, flags: int) -> int:
        GPU.stall("capture", "", 0)
        return graph

    @answers
    def cudaGraphLaunch(self, graph: int, stream: int) -> None:
        GPU.replay(graph)

    @answers
    def cudaGraphDestroy(self, graph: int) -> None:
        pass

    @answers
    def cudaGraphExecDestroy(self, graph: int) -> None:
        GPU.graphs.pop(graph, None)

    @answers
    def cudaEventCreate(self) -> int:
        return GPU.clock()

    @answers
    def cudaEventRecord(self, event: int, stream: int) -> None:
        GPU.queue(lambda: GPU._times.__setitem__(event, time.perf_counter()))

    @answers
    def cudaEventElapsedTime(self, begin: int, end: int) -> float:
        return 1e3 * GPU.elapsed(begin, end)

    @answers
    def cudaEventDestroy(self, event: int) -> None:
        pass

    @answers
    def cudaFree(self, address: int) -> None:
        pass

    @answers
    def cudaFreeHost(self, address: int) -> None:
        pass
