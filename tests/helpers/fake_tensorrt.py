"""A fake TensorRT: the part of its API that the runtime uses, over the fake device and ONNX
Runtime.

Its engine files contain the path of an fp32 graph. A test compares its names with the real
module's.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.runtime.engine import Call
from tests.helpers.fake_engine import FakeDevice, FakeEngine

ACTIVATIONS = 4096


class FakeCudaDevice(FakeDevice):
    """The fake device with a stream whose work can be captured instead of queued."""

    stream = 7
    capability = (12, 0)

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[int, list[Callable[[], Any]]] = {}
        self.replayed = 0
        self.captures = True
        self._recording: list[Callable[[], Any]] | None = None

    def queue(self, work: Callable[[], Any]) -> None:
        if self._recording is None:
            super().queue(work)
        else:
            self._recording.append(work)

    def capture(self, work: Callable[[], Any]) -> int:
        if not self.captures:
            raise CanvasError("CUDA: operation not permitted when stream is capturing", "")
        self._recording = []
        work()
        number = max(self.graphs, default=0) + 1
        self.graphs[number], self._recording = self._recording, None
        return number

    def replay(self, graph: int) -> None:
        self.replayed += 1
        for work in self.graphs[graph]:
            super().queue(work)

    def forget(self, graph: int) -> None:
        del self.graphs[graph]


class Severity(IntEnum):
    """Severity of a log line."""

    ERROR = 1


class ILogger:
    """TensorRT's base class of loggers."""

    ERROR = Severity.ERROR

    def log(self, severity: Severity, message: str) -> None: ...


class TensorIOMode(Enum):
    """Whether a tensor is read or written."""

    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(IntEnum):
    """Who gives a context its memory."""

    STATIC = 0
    USER_MANAGED = 2


class CudaGraphStrategy(IntEnum):
    """TensorRT-RTX only."""

    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class DynamicShapesKernelSpecializationStrategy(IntEnum):
    """TensorRT-RTX only."""

    LAZY = 0
    EAGER = 1
    NONE = 2


class IRuntimeConfig:
    """How a context of TensorRT-RTX runs."""

    cuda_graph_strategy = CudaGraphStrategy.DISABLED
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
    strategy = ExecutionContextAllocationStrategy.STATIC

    runtime_cache: object = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.runtime_cache = cache
        return True


class IExecutionContext:
    """One context: shapes, addresses, and the memory it was given."""

    def __init__(self, engine: ICudaEngine, config: Any) -> None:
        self._engine = engine
        self.config = config
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.set_calls = 0
        self._memory = 0

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self._engine.device_memory_size_v2
        assert self.profile is not None
        self._memory = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == FakeCudaDevice.stream
        self.profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.set_calls += 1
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.set_calls += 1
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self._memory
        assert self.profile is not None
        assert stream_handle == FakeCudaDevice.stream
        fake = self._engine.fake
        fake.run(Call({}, self._all_shapes(), dict(self.addresses), repeats=False))
        return True

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the inputs' shapes, and the outputs', which TensorRT infers."""
        given = self.shapes
        batch, length = given["hidden"][:2]
        shapes = dict(given) | dict.fromkeys(
            ("canvas", "argmax", "entropy", "accepted"), (batch, length)
        )
        shapes |= {"hidden_out": given["hidden"], "next_hidden": given["hidden"]}
        layers = [name for name in given if name.startswith("past_key_")]
        shapes["load"] = (len(layers),)
        for name in layers:
            _, heads, _, _, size = given[name]
            for part in ("key", "value"):
                number = name.rpartition("_")[2]
                shapes[f"new_{part}_{number}"] = (batch, heads, length, size)
        return shapes


class ICudaEngine:
    """A loaded engine."""

    device_memory_size_v2 = ACTIVATIONS

    def __init__(self, fake: FakeEngine) -> None:
        self.fake = fake
        self.contexts: list[IExecutionContext] = []
        self._names = [*fake.inputs, *fake.outputs]
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.fake.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        dtype = (self.fake.inputs | self.fake.outputs)[name]
        names = {np.dtype(np.float32): "FLOAT", np.dtype(np.int64): "INT64"}
        return SimpleNamespace(name=names.get(dtype, "BOOL"))

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, strategy: Any) -> IExecutionContext:
        self.contexts.append(IExecutionContext(self, strategy))
        return self.contexts[-1]


class Runtime:
    """Loads engines."""

    device: FakeCudaDevice

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        file = Path(bytes(serialized_engine).decode(errors="replace"))
        if not file.is_absolute():
            self._logger.log(ILogger.ERROR, "the magic tag does not match")
            return None
        return ICudaEngine(FakeEngine(file.stem, file, None, self.device))


# What TensorRT-RTX has and TensorRT does not.
RTX = (CudaGraphStrategy, DynamicShapesKernelSpecializationStrategy)
COMMON = (ILogger, TensorIOMode, ExecutionContextAllocationStrategy)
API = (*COMMON, *RTX, IRuntimeConfig, IExecutionContext, ICudaEngine, Runtime)


def fake_tensorrt(version: str, rtx: bool, device: FakeCudaDevice) -> Any:
    """Return the module, under either of its names, with one fake GPU."""
    classes = {each.__name__: each for each in (*COMMON, *(RTX if rtx else ()))}
    runtime = type("Runtime", (Runtime,), {"device": device})
    return SimpleNamespace(__version__=version, Runtime=runtime, **classes)
