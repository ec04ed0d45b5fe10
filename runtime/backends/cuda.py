"""A CUDA device: its memory, one stream, and graphs captured from that stream."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError, EngineError
from canvasrt.extras import require
from canvasrt.machine import OLDEST_DRIVER
from canvasrt.runtime.engine import KernelCall, Pitched

_GIB = 1 << 30
# Errors of CUDA's runtime API after which every further call of the process fails.
_FATAL = frozenset({46, 214, 220, 226, 700, 702, 709, 710, *range(714, 722), 805, 807, 911, 999})
# Maximum shared memory of a kernel in bytes, unless an attribute of the kernel raises it.
_SHARED = 48 << 10
_NO_GPU = f"check that `nvidia-smi` shows driver {OLDEST_DRIVER} or newer; start a container with --gpus all"


# The number of each thread's current device; 0 by default.
_current = threading.local()


class CudaDevice:
    """One GPU, through CUDA's runtime API."""

    def __init__(self, extra: str = "gpu", number: int = 0) -> None:
        """Open a device. `number` is its index among the devices that CUDA_VISIBLE_DEVICES lists. `extra` is the extra
        of canvasrt that installs CUDA's Python bindings.

        Raises CanvasError if there is no GPU, or if the driver is too old.
        """
        self._runtime: ModuleType = require("cuda.bindings.runtime", extra)
        self._driver: ModuleType = require("cuda.bindings.driver", extra)
        self._number = 0
        try:
            count = self._call("cudaGetDeviceCount")
        except CanvasError as error:
            raise CanvasError(f"no GPU can be used: {error}", _NO_GPU) from None
        if not count:
            raise CanvasError("this machine has no GPU", _NO_GPU)
        self._number = number
        properties = self._call("cudaGetDeviceProperties", number)
        self.name: str = properties.name.decode().strip("\0")
        self.capability: tuple[int, int] = (properties.major, properties.minor)
        # A stream that does not synchronize with the default stream.
        flags = self._runtime.cudaStreamNonBlocking
        self.stream = int(self._call("cudaStreamCreateWithFlags", flags))
        self._kinds = self._runtime.cudaMemcpyKind
        self._taken: list[tuple[str, int]] = []
        self._busy: list[np.ndarray] = []  # host arrays that queued copies may still read
        weakref.finalize(self, _give_back, self._runtime, self._taken)

    def allocate(self, size: int) -> int:
        try:
            address = int(self._call("cudaMalloc", max(1, size)))
        except CanvasError as error:
            free, total = self._call("cudaMemGetInfo")
            raise CanvasError(
                f"{self.name} cannot allocate {size / _GIB:.2f} GiB ({free / _GIB:.2f} of "
                f"{total / _GIB:.2f} GiB are free): {error}",
                "build with a smaller --max-context or --max-batch, or stop other programs on the GPU",
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
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def capture(self, work: Callable[[], Any]) -> int:
        """Record the calls that `work` queues, without running them. Return the recorded graph for `replay`.

        Raises CanvasError if the driver cannot capture them. In that case nothing is queued, and the stream remains
        usable.
        """
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            # End the capture, or it would record all further calls. If that fails, too, the error of `work` is the more
            # useful one.
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
        """Queue a captured graph."""
        self._call("cudaGraphLaunch", graph, self.stream)

    def forget(self, graph: int) -> None:
        """Free a captured graph that is not queued."""
        self._taken.remove(("cudaGraphExecDestroy", graph))
        self._call("cudaGraphExecDestroy", graph)

    def load_kernel(self, image: bytes, entry: str, shared: int) -> int:
        """Load a compiled kernel that uses `shared` bytes of shared memory; return its handle for `KernelCall`."""
        library = self._drive("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        kernel = self._drive("cuLibraryGetKernel", library, entry.encode())
        if shared > _SHARED:
            most = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._drive("cuKernelSetAttribute", most, shared, kernel, self._number)
        return int(kernel)

    def run_kernel(self, call: KernelCall) -> None:
        """Queue one of our own kernels."""
        addresses = [ctypes.addressof(each) for each in call.arguments]
        given = (ctypes.c_void_p * len(addresses))(*addresses)
        sizes = (*call.grid, call.threads, 1, 1, call.shared)
        self._drive("cuLaunchKernel", call.kernel, *sizes, self.stream, ctypes.addressof(given), 0)

    def _drive(self, name: str, *arguments: Any) -> Any:
        """Call one function of CUDA's driver, and return its result without the status."""
        return self._checked(getattr(self._driver, name)(*arguments), name)

    def clock(self) -> int:
        """Return an event recorded after all queued work. `elapsed` measures the time between two events."""
        event = self._call("cudaEventCreate")
        self._call("cudaEventRecord", event, self.stream)
        return int(event)

    def elapsed(self, begin: int, end: int) -> float:
        """Return the seconds between two events and free both. Call this after `synchronize`."""
        took = self._call("cudaEventElapsedTime", begin, end)
        for event in (begin, end):
            self._call("cudaEventDestroy", event)
        return float(took) / 1e3

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call one function of CUDA's runtime and return its result without the status."""
        if getattr(_current, "number", 0) != self._number:
            self._checked(self._runtime.cudaSetDevice(self._number), "cudaSetDevice")
            _current.number = self._number
        return self._checked(getattr(self._runtime, name)(*arguments), name)

    def _checked(self, result: tuple[Any, ...], name: str) -> Any:
        status, *values = result
        if int(status) != 0:
            try:
                # Driver errors have the same numbers as runtime errors, except for a few that the runtime lacks.
                known = self._runtime.cudaError_t(int(status))
                _, words = self._runtime.cudaGetErrorString(known)
                text = words.decode()
            except ValueError:
                text = f"driver error {int(status)}"
            raise EngineError(
                f"CUDA: {text} ({name})",
                "check the GPU with `nvidia-smi`",
                fatal=int(status) in _FATAL,
            )
        return values[0] if len(values) == 1 else tuple(values) or None


def _give_back(runtime: ModuleType, taken: list[tuple[str, int]]) -> None:
    # Free graphs before the memory that they use.
    for free, address in reversed(taken):
        getattr(runtime, free)(address)
