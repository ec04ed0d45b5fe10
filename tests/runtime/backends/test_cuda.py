"""The CUDA device on a fake of CUDA's runtime: the order of calls, and the memory that is freed."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.machine import gpus
from canvasrt.runtime.backends import cuda
from canvasrt.runtime.backends.cuda import CudaDevice
from canvasrt.runtime.engine import Pitched


class Status(IntEnum):
    """The status that every call returns."""

    OK = 0
    FAILED = 900


class Runtime:
    """A fake of CUDA's runtime with the interface of the bindings: every call returns a status, then its results."""

    cudaStreamNonBlocking = 1

    class cudaMemcpyKind(IntEnum):
        cudaMemcpyHostToDevice = 1
        cudaMemcpyDeviceToHost = 2
        cudaMemcpyDeviceToDevice = 3

    class cudaStreamCaptureMode(IntEnum):
        cudaStreamCaptureModeThreadLocal = 1

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    class Properties:
        name, major, minor = b"fake\0\0", 9, 0

    gives: ClassVar[dict[str, tuple[Any, ...]]] = {
        "cudaGetDeviceCount": (1,),
        "cudaGetDeviceProperties": (Properties,),
        "cudaStreamCreateWithFlags": (7,),
        "cudaStreamEndCapture": (50,),
        "cudaGraphInstantiate": (60,),
        "cudaMemGetInfo": (1 << 30, 2 << 30),
        "cudaGetErrorString": (b"it did not work",),
        "cudaEventCreate": (80,),
        "cudaEventElapsedTime": (1.0,),
        "cuLibraryLoadData": (70,),
        "cuLibraryGetKernel": (71,),
    }

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self._kept: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.fails:
                return (Status.FAILED, *(None for _ in self.gives.get(name, ())))
            if name in ("cudaMalloc", "cudaMallocHost"):
                self._kept.append(np.zeros(arguments[0], np.uint8))
                return (Status.OK, self._kept[-1].ctypes.data)
            return (Status.OK, *self.gives.get(name, ()))

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(cuda, "require", lambda *_: made)
    return made


def test_what_was_taken_is_given_back_graphs_first(runtime: Runtime) -> None:
    device = CudaDevice()
    address = device.allocate(16)
    device.host(8)
    graph = device.capture(lambda: None)
    device.forget(graph)
    assert device.capture(lambda: None) == graph
    runtime.calls.clear()
    del device
    gc.collect()
    assert runtime.names() == ["cudaGraphExecDestroy", "cudaFreeHost", "cudaFree"]
    assert runtime.calls[-1] == ("cudaFree", address)


def test_work_that_fails_ends_its_capture(runtime: Runtime) -> None:
    """The capture is ended even if the work fails; otherwise, it would record all later work. The work's error is
    raised."""
    device = CudaDevice()

    def work() -> None:
        runtime.fails.add("cudaStreamEndCapture")
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        device.capture(work)
    assert runtime.names()[-1] == "cudaStreamEndCapture"


def test_a_graph_that_cannot_be_made_is_an_error_and_leaves_nothing(runtime: Runtime) -> None:
    device = CudaDevice()
    runtime.fails.add("cudaGraphInstantiate")
    with pytest.raises(CanvasError, match=r"it did not work \(cudaGraphInstantiate\)"):
        device.capture(lambda: None)
    assert ("cudaGraphDestroy", 50) in runtime.calls


def test_too_little_memory_says_how_much_there_is(runtime: Runtime) -> None:
    device = CudaDevice()
    runtime.fails.add("cudaMalloc")
    with pytest.raises(
        CanvasError, match=r"cannot allocate 3\.00 GiB \(1\.00 of 2\.00 GiB are free\)"
    ):
        device.allocate(3 << 30)


def test_an_array_lives_until_its_copy_is_done(runtime: Runtime) -> None:
    device = CudaDevice()
    array = np.ones(4, np.uint8)
    device.upload(device.allocate(4), array)
    assert any(each is array for each in device._busy)
    device.synchronize()
    assert not device._busy


def test_small_kernels_need_no_leave_for_their_memory(runtime: Runtime) -> None:
    device = CudaDevice()
    device.load_kernel(b"image", "sort_rows", 48 << 10)
    assert "cuKernelSetAttribute" not in runtime.names()


def test_an_error_that_only_the_driver_has(runtime: Runtime) -> None:
    device = CudaDevice()
    runtime.fails.add("cuLibraryLoadData")
    with pytest.raises(CanvasError, match=r"it did not work \(cuLibraryLoadData\)"):
        device.load_kernel(b"image", "down", 0)

    def unknown(status: int) -> None:
        raise ValueError(f"{status} is not a valid cudaError_t")

    runtime.cudaError_t = unknown  # type: ignore[attr-defined]
    with pytest.raises(CanvasError, match=r"driver error 900 \(cuLibraryLoadData\)"):
        device.load_kernel(b"image", "down", 0)


@pytest.mark.skipif(bool(gpus()), reason="the calls would reach the GPU")
def test_the_real_bindings_take_every_call_and_return_as_many_values(runtime: Runtime) -> None:
    """Without a driver, every call returns an error status. A wrong number or type of arguments would raise an
    exception."""
    real = pytest.importorskip("cuda.bindings.runtime", reason="needs canvasrt[gpu]")
    device, array = CudaDevice(), np.zeros(8, np.uint8)
    address = device.allocate(8)
    device.host(8)
    device.upload(address, array)
    device.download(array, address)
    for height in (1, 2):
        device.copy(Pitched(address, 4), Pitched(address, 4), 2, height)
    device.replay(device.capture(lambda: None))
    device.memory()
    device.elapsed(device.clock(), device.clock())
    device.synchronize()
    calls = {name: arguments for name, *arguments in runtime.calls}
    assert len(calls) >= 17
    for name, arguments in calls.items():
        given = [
            getattr(real, type(each).__name__)(each) if isinstance(each, IntEnum) else each
            for each in arguments
        ]
        one = name in ("cudaMalloc", "cudaMallocHost")
        found = getattr(real, name)(*given)
        assert len(found) == 1 + len((0,) if one else runtime.gives.get(name, ())), name


DRIVEN = """
import cuda.bindings.driver, cuda.bindings.runtime
from canvasrt.errors import EngineError
from canvasrt.runtime.backends.cuda import CudaDevice
from canvasrt.runtime.backends.sorted_engine import kernel_arguments
from canvasrt.runtime.engine import KernelCall

device = object.__new__(CudaDevice)  # its own calls need a GPU
device._runtime, device._driver = cuda.bindings.runtime, cuda.bindings.driver
device._number, device.stream = 0, 7
try:
    kernel = device.load_kernel(b"image", "gate_up", 64 << 10)
    given = kernel_arguments([1 << 40, 16, 32, 48, 64, 80], 300, 0.5)
    device.run_kernel(KernelCall(kernel, (5, 2, 1), 128, 1000, given))
except EngineError as error:
    print("fatal:" if error.fatal else "error:", error, flush=True)
"""


DRIVER = {
    "load": ("cuLibraryLoadData", "image 0 0"),
    "get": ("cuLibraryGetKernel", "70 gate_up"),
    "set": ("cuKernelSetAttribute", "8 65536 71 0"),
    "launch": (
        "cuLaunchKernel",
        "71 grid 5 2 1 threads 128 1 1 shared 1000 stream 7:"
        " 1099511627776 16 32 48 64 80 300 0.5 0 0 end",
    ),
}


@pytest.mark.parametrize("fails", ["", *DRIVER])
def test_the_driver_gets_our_kernels_arguments_through_the_real_bindings(
    fails: str, tmp_path: Path
) -> None:
    """The calls reach a fake libcuda that records them and makes one of them fail.

    Calls of CUDA's runtime cannot be tested in this way: libcudart first asks libcuda for undocumented tables
    (cuGetExportTable), and returns error 500 without them.
    """
    pytest.importorskip("cuda.bindings.driver", reason="needs canvasrt[gpu]")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, to make a libcuda")
    source = Path(__file__).parents[2] / "data" / "recording_libcuda.c"
    library = tmp_path / "libcuda.so.1"
    build = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(build, check=True)
    found = {"LD_LIBRARY_PATH": str(tmp_path), "FAILS": fails, "CODE": "700"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVEN],
        env={**os.environ, **found},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    wanted = []
    for call, (name, arguments) in DRIVER.items():
        wanted.append(f"{call} {arguments}")
        if call == fails:
            wanted.append(f"fatal: CUDA: an illegal memory access was encountered ({name})")
            break
    assert done.stdout.splitlines() == wanted
