"""The backend for TensorRT-RTX and TensorRT, whose Python modules have the same API."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from canvasrt.engine_profiles import Profiles
from canvasrt.errors import CanvasError, EngineError
from canvasrt.extras import require
from canvasrt.machine import BUILDER_MODULES
from canvasrt.runtime.backends.compiled_kernels import CompiledKernels
from canvasrt.runtime.backends.cuda import CudaDevice
from canvasrt.runtime.backends.sorted_engine import SharedBuffers, SortedEngine
from canvasrt.runtime.bundle_facts import host_dtype
from canvasrt.runtime.engine import Engine, EngineCall
from canvasrt.sorted_rows.description import SORTED_SUFFIX

_log = logging.getLogger(__name__)

# TensorRT's data types → dtype names in NumPy or ml_dtypes.
NUMPY_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
}


def check_target(
    target: Mapping[str, Any], version: str, capability: tuple[int, int], machine: str
) -> None:
    """Raise CanvasError if the engines were built by another builder version, or for another GPU or CPU architecture.

    target: the manifest's entry. version: the installed builder's version. capability: this GPU's compute capability.
    machine: this CPU's architecture.
    """
    again = f"build it again: `canvasrt build ... --target {target['name']}`"
    if target["builder_version"] != version:
        raise CanvasError(
            f"the engines were built by {target['backend']} {target['builder_version']}, but "
            f"{version} is installed here",
            f"{again}, or install {target['backend']}=={target['builder_version']}",
        )
    here = ".".join(map(str, capability))
    if here not in target["compute_capability"].split(", "):
        raise CanvasError(
            f"the engines were built for {target['name']}, compute capability "
            f"{target['compute_capability']}, but the GPU here has {here}",
            "build for this GPU: `canvasrt targets` lists the names",
        )
    # NVIDIA does not document whether an engine runs on a CPU architecture that differs from the builder's. Engines of
    # TensorRT-RTX are accepted on any architecture, because their kernels are compiled on the machine that runs them.
    built_on = target.get("built_on", machine)
    if target["backend"] == "tensorrt" and built_on != machine:
        raise CanvasError(
            f"the engines were built on {built_on}, and this machine is {machine}", again
        )


class TensorRTBackend:
    """Opens engines with the module that built them. All execution contexts share one buffer for activations."""

    def __init__(
        self,
        target: Mapping[str, Any],
        rows_apart: bool = True,
        module: Any = None,
        device: CudaDevice | None = None,
        compiled: Callable[[str], Path] | None = None,
        gpu: int = 0,
    ) -> None:
        """Open a GPU by its number.

        target: the manifest's entry. rows_apart: run one request per pass. module, device: replace the target's module
        and the GPU. compiled: maps the GPU's name to the file for TensorRT-RTX's compiled kernels; None stores no
        kernels.

        Raises CanvasError if the module or the GPU is missing, or if the engines were built for another GPU or version.
        """
        name, extra = BUILDER_MODULES[target["backend"]]
        self.module = module or require(name, extra)
        try:
            self.device = device or CudaDevice(extra, gpu)
        except CanvasError as error:
            raise CanvasError(
                f"the bundle was built for {target['name']}: {error}", error.hint
            ) from None
        capability = self.device.capability
        check_target(target, self.module.__version__, capability, platform.machine())
        self.rows_apart = rows_apart
        self.logger = _logger(self.module)
        self.runtime = self.module.Runtime(self.logger)
        self.engines: list[TensorRTEngine] = []
        self._between = SharedBuffers(self.device)
        self._activations: tuple[int, int] | None = None
        self.compiled = CompiledKernels(compiled(self.device.name) if compiled else None)

    def open_engine(self, name: str, file: Path, profiles: Any) -> Engine:
        if file.name.endswith(SORTED_SUFFIX):
            opened = partial(self._open, profiles=profiles)
            return SortedEngine(name, file, profiles, opened, self._between)
        return self._open(name, file, profiles)

    def _open(self, name: str, file: Path, profiles: Any) -> TensorRTEngine:
        # Memory-mapped, because an engine can be as large as the machine's memory.
        engine = self.runtime.deserialize_cuda_engine(np.memmap(file, np.uint8, "r"))
        if engine is None:
            raise CanvasError(
                f"{file} cannot be loaded: {self.logger.last}",
                "check the bundle with `canvasrt verify`, then build it again",
            )
        opened = TensorRTEngine(self, name, engine, Profiles(profiles))
        self.engines.append(opened)
        return opened

    def activations(self) -> tuple[int, int]:
        """Return the address and size of the activation memory. Engines can share this memory because they run one
        after another."""
        if self._activations is None:
            size = max(engine.activation_bytes for engine in self.engines)
            self._activations = (self.device.allocate(size), size)
        return self._activations

    def keep_compiled(self) -> None:
        self.compiled.keep()


class TensorRTEngine:
    """One engine. For every profile, calls without a `place` share an execution context, and every place in the batch
    has its own context. A place's context replays the latest call as a CUDA graph. TensorRT-RTX captures graphs itself.
    """

    def __init__(
        self, backend: TensorRTBackend, name: str, engine: Any, profiles: Profiles
    ) -> None:
        self.name = name
        self.profiles = profiles
        self._backend, self._engine = backend, engine
        self.inputs: dict[str, np.dtype] = {}
        self.outputs: dict[str, np.dtype] = {}
        for index in range(engine.num_io_tensors):
            tensor = engine.get_tensor_name(index)
            dtype = host_dtype(NUMPY_DTYPES[engine.get_tensor_dtype(tensor).name])
            is_input = engine.get_tensor_mode(tensor) == backend.module.TensorIOMode.INPUT
            (self.inputs if is_input else self.outputs)[tensor] = dtype
        self.activation_bytes = int(engine.device_memory_size_v2)
        self.captures_itself = hasattr(backend.module, "CudaGraphStrategy")
        # Keyed by profile and place; a shared context's place is None. A value of None means that the place's context
        # could not be created, or that it refused a call.
        self._contexts: dict[tuple[int, int | None], _Context | None] = {}

    def prepare(self) -> None:
        self._backend.activations()
        # Create every profile's shared context, which also runs the calls that no other context can run.
        for profile in range(self.profiles.count):
            self._context(profile)

    def launch(self, call: EngineCall) -> None:
        profile = self.profiles.pick(call.dims)
        if profile is None:
            raise EngineError(
                f"{self.name} has no profile for {dict(call.dims)}",
                "build with a larger --max-context or --max-batch, or ask for fewer tokens",
            )
        if call.place is None or not self._repeat(profile, call.place, call):
            self._context(profile).run(call)

    def _repeat(self, profile: int, place: int, call: EngineCall) -> bool:
        """Run a call in its place's context. Return False if the context cannot be created or refuses the call;
        the shared context can still run the call, more slowly."""
        key = profile, place
        try:
            if key not in self._contexts:
                self._contexts[key] = self._new_context(profile, captures=True)
            context = self._contexts[key]
            if context is not None:
                context.repeat(call)
        except CanvasError as error:
            if isinstance(error, EngineError) and error.fatal:
                raise
            _log.warning(
                "%s: place %d runs in a shared context, which is slower: %s",
                self.name,
                place,
                error,
            )
            self._backend.device.synchronize()  # queued work may still use the context
            self._contexts[key] = None
            return False
        return context is not None

    def _context(self, profile: int) -> _Context:
        context = self._contexts.get((profile, None))
        if context is None:
            context = self._contexts[profile, None] = self._new_context(profile, captures=False)
        return context

    def _new_context(self, profile: int, captures: bool) -> _Context:
        trt, device = self._backend.module, self._backend.device
        own = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.captures_itself:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(own)
            strategy = trt.CudaGraphStrategy
            config.cuda_graph_strategy = (
                strategy.WHOLE_GRAPH_CAPTURE if captures else strategy.DISABLED
            )
            # LAZY would switch kernels during a request, which changes results' last bits. EAGER compiles at a shape's
            # first use, which is in the warm-up.
            kernels = trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
            compiled = self._backend.compiled.of(config)
            if compiled is not None:
                config.set_runtime_cache(compiled)
            context = self._engine.create_execution_context(config)
        else:
            compiled = None
            context = self._engine.create_execution_context(own)
        if context is None:
            raise CanvasError(
                f"{self.name}: TensorRT created no execution context: {self._backend.logger.last}",
                "the GPU's memory may be full: build with a smaller --max-context or --max-batch",
            )
        if not context.set_optimization_profile_async(profile, device.stream):
            raise CanvasError(
                f"{self.name} has no profile {profile}: {self._backend.logger.last}",
                "build the bundle again with this version",
            )
        context.set_device_memory(*self._backend.activations())
        # Otherwise engines built with detailed profiling emit NVTX marks for every kernel.
        context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        return _Context(self, context, device, compiled)

    def refused(self, what: str) -> EngineError:
        """Return the error for a call that TensorRT refused."""
        return EngineError(
            f"{self.name}: TensorRT refused {what}: {self._backend.logger.last}",
            "check the bundle with `canvasrt verify`, then build it again",
        )


class _Context:
    """An execution context. A call sets only the shapes and addresses that changed since the previous call."""

    def __init__(
        self, engine: TensorRTEngine, context: Any, device: CudaDevice, compiled: Any = None
    ) -> None:
        """Wrap a context. `compiled` is the kernel cache, which must outlive the context."""
        self._engine, self._context, self._device = engine, context, device
        self._compiled = compiled
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._latest: tuple[Any, ...] | None = None  # the latest call's key
        self._graph: int | None = None  # the latest call's CUDA graph, once captured
        self._fits = True  # whether the latest call can be captured
        self._captures = True  # False after a capture has failed
        self._warned = False

    def run(self, call: EngineCall) -> None:
        for name in self._engine.inputs:
            shape = call.shapes[name]
            if self._shapes.get(name) != shape:
                if not self._context.set_input_shape(name, shape):
                    raise self._engine.refused(f"shape {list(shape)} for {name}")
                self._shapes[name] = shape
        for name in (*self._engine.inputs, *self._engine.outputs):
            address = call.addresses[name]
            if self._addresses.get(name) != address:
                if not self._context.set_tensor_address(name, address):
                    raise self._engine.refused(f"the address of {name}")
                self._addresses[name] = address
        self.enqueue()

    def enqueue(self) -> None:
        """Queue a run with the current shapes and addresses."""
        if not self._context.execute_async_v3(self._device.stream):
            raise self._engine.refused("to run")

    def repeat(self, call: EngineCall) -> None:
        """Run a call that is likely to be repeated. Repetitions run as a CUDA graph."""
        if call.key != self._latest:
            self._forget()
            self._latest = call.key
            self.run(call)  # the first run initializes state, which cannot be captured
            self._fits = self._captures and self._is_capturable()
        elif self._graph is not None:
            self._device.replay(self._graph)
        elif not self._fits or self._engine.captures_itself or not self._capture():
            self.run(call)

    def _is_capturable(self) -> bool:
        """Ask TensorRT whether the current call can be captured."""
        ask = getattr(self._context, "is_stream_capturable", None)
        if ask is None or ask(self._device.stream):
            return True
        self._warn("TensorRT says it cannot be captured")
        return False

    def _capture(self) -> bool:
        """Capture the latest call and queue it. If that fails, return False; this context never tries again."""
        try:
            self._graph = self._device.capture(self.enqueue)
        except CanvasError as error:
            if isinstance(error, EngineError) and error.fatal:
                raise
            self._warn(str(error))
            self._fits = self._captures = False
            return False
        self._device.replay(self._graph)
        return True

    def _warn(self, why: str) -> None:
        """Log only this context's first warning, because alternating calls would repeat it."""
        if not self._warned:
            _log.warning("%s runs without a CUDA graph: %s", self._engine.name, why)
        self._warned = True

    def _forget(self) -> None:
        if self._graph is not None:
            self._device.synchronize()  # no queued work may use the old graph any more
            self._device.forget(self._graph)
            self._graph = None


def _logger(trt: ModuleType) -> Any:
    """Return an object that receives TensorRT's log and keeps the last error."""

    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]
        last = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            _log.debug("%s: %s", severity.name, message)
            if severity <= trt.ILogger.ERROR:
                self.last = " ".join(message.split())

    return Logger()
