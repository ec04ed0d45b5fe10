"""A fake engine on a fake device: ONNX Runtime with host buffers, for machines without a GPU.

It replaces TensorRT in tests of buffers. Like TensorRT, it gets addresses and shapes, writes to these addresses, and
refuses sizes outside its profiles and unaligned addresses. Nothing runs until the device is synchronized.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from canvasrt.engine_profiles import Profiles
from canvasrt.errors import CanvasError
from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaEngine
from canvasrt.runtime.engine import EngineCall, Pitched
from canvasrt.runtime.gpu.device_cache import ALIGNMENT


class FakeDevice:
    """Host memory in the role of a device's, with a queue of work that runs when the device is synchronized."""

    name = "fake"

    def __init__(self, size: int = 1 << 32) -> None:
        self.left = self._size = size
        self.uploaded = self.downloaded = 0
        self._memory: list[np.ndarray] = []
        self._times: list[float] = []
        self._queue: list[Callable[[], None]] = []

    def allocate(self, size: int) -> int:
        if size > self.left:
            raise CanvasError(f"the fake device has no {size} bytes left", "give it more")
        self.left -= size
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        self._memory.append(memory)
        return -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT

    def host(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def upload(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self.uploaded += array.nbytes
        self.queue(lambda: ctypes.memmove(address, array.ctypes.data, array.nbytes))

    def download(self, array: np.ndarray, address: int) -> None:
        self.downloaded += array.nbytes
        self.queue(lambda: ctypes.memmove(array.ctypes.data, address, array.nbytes))

    def copy(self, to: Pitched, source: Pitched, width: int, height: int) -> None:
        begins = (to.address, source.address)
        ends = [p.address + p.pitch * (height - 1) + width for p in (to, source)]
        assert width <= min(to.pitch, source.pitch)
        assert ends[0] <= begins[1] or ends[1] <= begins[0], "the pieces overlap"

        def run() -> None:
            for piece in range(height):
                begin = (to.address + piece * to.pitch, source.address + piece * source.pitch)
                ctypes.memmove(*begin, width)

        self.queue(run)

    def clock(self) -> int:
        number = len(self._times)
        self._times.append(0.0)
        self.queue(lambda: self._times.__setitem__(number, time.perf_counter()))
        return number

    def elapsed(self, begin: int, end: int) -> float:
        return self._times[end] - self._times[begin]

    def queue(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)

    def memory(self) -> tuple[int, int]:
        return self.left, self._size

    def synchronize(self) -> None:
        queue, self._queue = self._queue, []
        for work in queue:
            work()


class FakeEngine:
    """An fp32 graph as an engine: canvasrt's engine for the CUDA provider, with host memory."""

    def __init__(self, name: str, file: Path, profiles: Any, device: FakeDevice) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Otherwise, ONNX Runtime replaces quantized products by integer products, which it lacks for FP8.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        session = ort.InferenceSession(str(file), options, ["CPUExecutionProvider"])
        # Input or output → its sizes: a number, or the name of a size that depends on the call.
        known = (*session.get_inputs(), *session.get_outputs())
        self.shapes: dict[str, list[int | str]] = {v.name: v.shape for v in known}
        self._bound = OrtCudaEngine(name, session, device_type="cpu")
        self._device = device
        self.profiles = Profiles(profiles) if profiles else self._bound.profiles
        self.name, self.inputs, self.outputs = name, self._bound.inputs, self._bound.outputs
        self.calls: list[EngineCall] = []
        self.prepared = False

    def prepare(self) -> None:
        self.prepared = True

    def launch(self, call: EngineCall) -> None:
        assert self.prepared
        if self.profiles.pick(call.dims) is None:
            raise CanvasError(f"{self.name}: no profile holds {dict(call.dims)}", "")
        self.calls.append(call)
        self.run(call)

    def run(self, call: EngineCall) -> None:
        """Queue the call."""
        for name in (*self.inputs, *self.outputs):
            assert call.addresses[name] % ALIGNMENT == 0, name
        self._device.queue(lambda: self._bound.launch(call))


class FakeBackend:
    """Opens fp32 graphs, plain or rewritten for a CPU, as engines with arbitrary profiles."""

    made = FakeEngine

    def __init__(self, profiles: Mapping[str, Any] | None = None, rows_apart: bool = False) -> None:
        """`profiles` replace the bundle's, by kind of segment: `body`, `head` or `vision`."""
        self.device = FakeDevice()
        self.rows_apart = rows_apart
        self.engines: dict[str, FakeEngine] = {}
        self._profiles = profiles or {}

    def open_engine(self, name: str, file: Path, profiles: Any) -> FakeEngine:
        kind = name.partition("_")[0]
        engine = self.made(name, file, self._profiles.get(kind, profiles), self.device)
        self.engines[name] = engine
        return engine

    def keep_compiled(self) -> None:
        """Do nothing, since nothing is compiled."""
