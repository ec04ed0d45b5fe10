"""A CUDA device: its memory, one stream of work on it, and graphs captured from that stream."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.runtime.engine import Pitched

_GIB = 1 << 30
_NO_GPU = "see `nvidia-smi`; in a container, start it with --gpus all"


class CudaDevice:
    """The first GPU, by way of CUDA's runtime."""

    def __init__(self, extra: str = "gpu") -> None:
        """extra: the extra of canvasrt that brings CUDA's Python bindings to who asks.

        Raises CanvasError when there is no GPU, or no driver that is new enough.
        """
        self._runtime: ModuleType = require("cuda.bindings.runtime", extra)
        try:
            count = self._call("cudaGetDeviceCount")
        except CanvasError as error:
            raise CanvasError(f"no GPU can be used: {error}", _NO_GPU) from None
        if not count:
            raise CanvasError("there is no GPU in this machine", _NO_GPU)
        self._call("cudaSetDevice", 0)
        properties = self._call("cudaGetDeviceProperties", 0)
        self.name: str = properties.name.decode().strip("\0")
        self.capability: tuple[int, int] = (properties.major, properties.minor)
        # A stream that does not wait for the default one.
        flags = self._runtime.cudaStreamNonBlocking
        self.stream = int(self._call("cudaStreamCreateWithFlags", flags))
        self._kinds = self._runtime.cudaMemcpyKind
        self._taken: list[tuple[str, int]] = []
        self._busy: list[np.ndarray] = []  # arrays of the host that a queued copy may still read
        weakref.finalize(self, _give_back, self._runtime, self._taken)

    def allocate(self, size: int) -> int:
        try:
            address = int(self._call("cudaMalloc", max(1, size)))
        except CanvasError as error:
            free, total = self._call("cudaMemGetInfo")
            raise CanvasError(
                f"{self.name} has no {size / _GIB:.2f} GiB left ({free / _GIB:.2f} of "
                f"{total / _GIB:.2f} GiB are free): {error}",
                "build with a smaller --max-context or --max-batch, or end what else uses the GPU",
            ) from None
        self._taken.append(("cudaFree", address))
        self._call("cudaMemsetAsync", address, 0, max(1, size), self.stream)
        return address

    def host(self, size: int) -> np.ndarray:
        address = int(self._call("cudaMallocHost", max(1, size)))
        self._taken.append(("cudaFreeHost", address))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        array[:] = 0
        return array

    def upload(self, address: int, array: np.ndarray) -> None:
        self._busy.append(array)
        kind = self._kinds.cudaMemcpyHostToDevice
        source = array.ctypes.data
        self._call("cudaMemcpyAsync", address, source, array.nbytes, kind, self.stream)

    def download(self, array: np.ndarray, address: int) -> None:
        kind = self._kinds.cudaMemcpyDeviceToHost
        to = array.ctypes.data
        self._call("cudaMemcpyAsync", to, address, array.nbytes, kind, self.stream)

    def copy(self, to: Pitched, source: Pitched, width: int, height: int) -> None:
        kind = self._kinds.cudaMemcpyDeviceToDevice
        if height == 1:
            self._call("cudaMemcpyAsync", to.address, source.address, width, kind, self.stream)
            return
        pieces = (to.address, to.pitch, source.address, source.pitch, width, height)
        self._call("cudaMemcpy2DAsync", *pieces, kind, self.stream)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)
        self._busy.clear()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory."""
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def driver(self) -> str:
        """The CUDA version that the driver speaks, and that of the runtime."""
        driver, runtime = self._call("cudaDriverGetVersion"), self._call("cudaRuntimeGetVersion")
        return " / ".join(f"{v // 1000}.{v % 1000 // 10}" for v in (int(driver), int(runtime)))

    def capture(self, work: Callable[[], Any]) -> int:
        """A graph of what `work` queues, which is recorded and not run. Launch it with `replay`.

        CanvasError when the driver cannot capture it; nothing is queued then, and the stream goes on as before.
        """
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            # An open capture would take in all that follows. What `work` raised says more than how it ends.
            _, graph = self._runtime.cudaStreamEndCapture(self.stream)
            if graph:
                self._runtime.cudaGraphDestroy(graph)
            raise
        graph = self._call("cudaStreamEndCapture", self.stream)
        try:
            executable = int(self._call("cudaGraphInstantiate", graph, 0))
        finally:
            self._call("cudaGraphDestroy", graph)
        self._taken.append(("cudaGraphExecDestroy", executable))
        return executable

    def replay(self, graph: int) -> None:
        """Queues a captured graph."""
        self._call("cudaGraphLaunch", graph, self.stream)

    def forget(self, graph: int) -> None:
        """Frees a captured graph that no queued work uses."""
        self._taken.remove(("cudaGraphExecDestroy", graph))
        self._call("cudaGraphExecDestroy", graph)

    def clock(self) -> int:
        """An event after what is queued now: two of them measure the time between, with `elapsed`."""
        event = self._call("cudaEventCreate")
        self._call("cudaEventRecord", event, self.stream)
        return int(event)

    def elapsed(self, begin: int, end: int) -> float:
        """Seconds between two events, after `synchronize`; both are freed."""
        took = self._call("cudaEventElapsedTime", begin, end)
        for event in (begin, end):
            self._call("cudaEventDestroy", event)
        return float(took) / 1e3

    def _call(self, name: str, *arguments: Any) -> Any:
        """One function of CUDA's runtime: what it returns, without its status."""
        status, *values = getattr(self._runtime, name)(*arguments)
        if int(status) != 0:
            _, words = self._runtime.cudaGetErrorString(status)
            raise CanvasError(f"CUDA: {words.decode()} ({name})", "check the GPU with `nvidia-smi`")
        return values[0] if len(values) == 1 else tuple(values) or None


def _give_back(runtime: ModuleType, taken: list[tuple[str, int]]) -> None:
    # Graphs before the memory that they use.
    for free, address in reversed(taken):
        getattr(runtime, free)(address)
