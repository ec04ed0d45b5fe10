"""A fake TensorRT: the part of its API that the runtime uses, on the fake device and ONNX Runtime.

Its engine files name an fp32 graph and the engine's profiles. It behaves like the real one: it refuses shapes outside
the profile, compiles kernels for every new shape, captures a graph for every new call, and fails every call after an
error of the device. A test compares its names with the real module's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.backends.tensorrt import NUMPY_DTYPES
from canvasrt.runtime.bundle_facts import host_dtype
from canvasrt.runtime.engine import EngineCall
from canvasrt.runtime.gpu.device_cache import ALIGNMENT
from tests.helpers.fake_engine import FakeDevice, FakeEngine

ACTIVATIONS = 4096
# Estimated seconds that a request waits for each kind of event.
COMPILE, CONTEXT, CAPTURE = 2.0, 0.05, 0.01
CONTEXT_BYTES = 2 << 20
SQUARE = 9  # patches per soft token


def engine_file(graph: Path, profiles: Any) -> bytes:
    """Return the file of an engine for a graph. Without profiles, the engine accepts every size."""
    return json.dumps({"graph": str(graph), "profiles": profiles or [{}]}).encode()


class FakeCudaDevice(FakeDevice):
    """A fake device with a stream, whose work can be captured instead of queued."""

    stream = 7
    capability = (12, 0)

    def __init__(self, size: int = 1 << 32) -> None:
        super().__init__(size)
        self.graphs: dict[int, list[Callable[[], Any]]] = {}
        self.replayed = 0
        self.captures = True
        self.breaks_captures = False  # although TensorRT allows the capture
        # Events for which a request waited, (what, engine), and all their seconds.
        self.stalls: list[tuple[str, str]] = []
        self.waited = 0.0
        # How many pieces of work may be queued before a kernel fails; None means that none fails.
        self.fails_after: int | None = None
        self._poisoned = False
        self._recording: list[Callable[[], Any]] | None = None

    def stall(self, what: str, engine: str, seconds: float) -> None:
        self.stalls.append((what, engine))
        self.waited += seconds

    def count(self, what: str) -> int:
        return sum(each == what for each, _ in self.stalls)

    def queue(self, work: Callable[[], Any]) -> None:
        self._check()
        if self.fails_after is not None:
            self.fails_after -= 1
            self._poisoned = self.fails_after < 0
        if self._recording is None:
            super().queue(work)
        else:
            self._recording.append(work)

    def synchronize(self) -> None:
        self._check()
        super().synchronize()

    def _check(self) -> None:
        """Raise the device's error. After a CUDA error, every later call on the device returns that error."""
        if self._poisoned:
            raise EngineError("CUDA: an illegal memory access was encountered", "", fatal=True)

    def capture(self, work: Callable[[], Any]) -> int:
        self._check()
        if not self.captures:
            raise CanvasError("CUDA: operation not permitted when stream is capturing", "")
        self._recording = []
        work()
        if self.breaks_captures:
            self._recording = None
            raise CanvasError("CUDA: operation failed due to a previous error during capture", "")
        number = max(self.graphs, default=0) + 1
        self.graphs[number], self._recording = self._recording, None
        self.stall("capture", "", CAPTURE)
        return number

    def replay(self, graph: int) -> None:
        self._check()
        self.replayed += 1
        for work in self.graphs[graph]:
            super().queue(work)

    def forget(self, graph: int) -> None:
        del self.graphs[graph]


class Severity(IntEnum):
    """The severity of a log line."""

    ERROR = 1


class ILogger:
    """The base class of loggers."""

    ERROR = Severity.ERROR

    def log(self, severity: Severity, msg: str) -> None: ...


class TensorIOMode(Enum):
    """Whether a tensor is read or written."""

    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(IntEnum):
    """Who allocates the memory of a context."""

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


class ProfilingVerbosity(IntEnum):
    """How much an engine says about its kernels."""

    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class IRuntimeCache:
    """Kernels compiled for shapes, by engine and profile; TensorRT-RTX only."""

    gpu = "fake"
    per_shape = 0  # bytes of the kernels of one shape

    def __init__(self) -> None:
        self.known: set[str] = set()

    def serialize(self) -> bytes:
        known = json.dumps({"gpu": self.gpu, "known": sorted(self.known)})
        return known.encode() + b"\n" + bytes(self.per_shape * len(self.known))

    def deserialize(self, blob: bytes) -> bool:
        data = json.loads(blob.partition(b"\n")[0])
        if data["gpu"] != self.gpu:
            return False
        self.known |= set(data["known"])
        return True


class IRuntimeConfig:
    """The settings of a context; TensorRT-RTX only."""

    cuda_graph_strategy = CudaGraphStrategy.DISABLED
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
    strategy = ExecutionContextAllocationStrategy.STATIC

    runtime_cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self.runtime_cache = cache
        return True


class IExecutionContext:
    """One context: its shapes, addresses, and memory."""

    nvtx_verbosity = ProfilingVerbosity.DETAILED  # the default is that of the build

    def __init__(self, engine: ICudaEngine, config: Any) -> None:
        self._engine = engine
        self.config = config
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.set_calls = 0
        self._memory = 0
        self._captured: set[Any] = set()
        cache = getattr(config, "runtime_cache", None)
        self._compiled: set[str] = engine.compiled if cache is None else cache.known

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self._engine.device_memory_size_v2
        assert self.profile is not None
        self._memory = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == FakeCudaDevice.stream
        if profile_index >= len(self._engine.profiles):
            return False
        self.profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.set_calls += 1
        assert self.profile is not None
        self.shapes[name] = shape
        return self._engine.takes(self.profile, name, shape)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.set_calls += 1
        self.addresses[name] = memory
        return memory % ALIGNMENT == 0

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream == FakeCudaDevice.stream
        return self._engine.device.captures

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self._memory
        assert self.profile is not None
        assert stream_handle == FakeCudaDevice.stream
        engine = self._engine
        if set(self.shapes) != set(engine.fake.inputs):
            return False
        self._compile()
        self._capture()
        engine.fake.run(EngineCall({}, self._all_shapes(), dict(self.addresses), repeats=False))
        return True

    def _compile(self) -> None:
        """Compile kernels for a new shape, and keep them in the cache of the context's configuration."""
        shape = json.dumps([self._engine.graph, self.profile, sorted(self.shapes.items())])
        if shape not in self._compiled:
            self._compiled.add(shape)
            self._engine.device.stall("compile", self._engine.fake.name, COMPILE)

    def _capture(self) -> None:
        if getattr(self.config, "cuda_graph_strategy", 0) != CudaGraphStrategy.WHOLE_GRAPH_CAPTURE:
            return
        call = (tuple(self.shapes.items()), tuple(self.addresses.items()))
        if self._engine.device.captures and call not in self._captured:
            # A context keeps only the graph of its latest call.
            self._captured = {call}
            self._engine.device.stall("capture", self._engine.fake.name, CAPTURE)

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of inputs and of outputs. The real TensorRT infers the latter."""
        given = self.shapes
        if "pixel_values" in given:
            images, patches = given["pixel_values"][:2]
            tokens = patches // SQUARE
            size = self._engine.fake.shapes["features"][-1]
            return dict(given) | {"features": (images, tokens, size), "valid": (images, tokens)}
        batch, length = given.get("hidden", given.get("positions"))[:2]
        shapes = dict(given) | dict.fromkeys(
            ("canvas", "argmax", "entropy", "accepted"), (batch, length)
        )
        size = self._engine.fake.shapes.get("hidden_out", (0,))[-1]
        shapes["hidden_out"] = (batch, length, size)
        if "hidden" in given:
            shapes["next_hidden"] = given["hidden"]
        for name in ("own", "index", "shares_out", "carried_0_out", "carried_1_out"):
            if name in self._engine.fake.shapes:
                shapes[name] = (batch, length, self._engine.fake.shapes[name][-1])
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

    def __init__(
        self, graph: Path, profiles: list[Mapping[str, Any]], device: FakeCudaDevice
    ) -> None:
        self.fake = FakeEngine(graph.stem, graph, None, device)
        self.graph, self.profiles, self.device = str(graph), profiles, device
        self.contexts: list[IExecutionContext] = []
        self.compiled: set[str] = set()
        self._names = [*self.fake.inputs, *self.fake.outputs]
        self.num_io_tensors = len(self._names)

    def takes(self, profile: int, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the shape of an input is within a profile."""
        wanted = self.fake.shapes[name]
        return len(wanted) == len(shape) and all(
            size == dim if isinstance(dim, int) else _holds(self.profiles[profile].get(dim), size)
            for dim, size in zip(wanted, shape, strict=True)
        )

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.fake.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        dtype = (self.fake.inputs | self.fake.outputs)[name]
        names = {host_dtype(ours): theirs for theirs, ours in NUMPY_DTYPES.items()}
        return SimpleNamespace(name=names[np.dtype(dtype)])

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, strategy: Any) -> IExecutionContext | None:
        if self.device.left < CONTEXT_BYTES:
            return None
        self.device.left -= CONTEXT_BYTES
        self.contexts.append(IExecutionContext(self, strategy))
        self.device.stall("context", self.fake.name, CONTEXT)
        return self.contexts[-1]


def _holds(size: Any, asked: int) -> bool:
    return size is None or size["min"] <= asked <= size["max"]


class Runtime:
    """Loads engines."""

    device: FakeCudaDevice

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        try:
            data = json.loads(bytes(serialized_engine))
        except ValueError:
            self._logger.log(ILogger.ERROR, "the magic tag does not match")
            return None
        return ICudaEngine(Path(data["graph"]), data["profiles"], self.device)


# Classes that TensorRT-RTX has and TensorRT lacks.
RTX = (CudaGraphStrategy, DynamicShapesKernelSpecializationStrategy)
COMMON = (ILogger, TensorIOMode, ExecutionContextAllocationStrategy, ProfilingVerbosity)
API = (
    *COMMON,
    *RTX,
    IRuntimeCache,
    IRuntimeConfig,
    IExecutionContext,
    ICudaEngine,
    Runtime,
)


def fake_tensorrt(version: str, rtx: bool, device: FakeCudaDevice) -> Any:
    """Return a fake module for one fake GPU: `tensorrt_rtx` if `rtx` is set, otherwise `tensorrt`."""
    classes = {each.__name__: each for each in (*COMMON, *(RTX if rtx else ()))}
    runtime = type("Runtime", (Runtime,), {"device": device})
    return SimpleNamespace(__version__=version, Runtime=runtime, **classes)
