"""ONNX Runtime's CUDA provider: runs exported graphs over GPU buffers, without a build."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from canvasrt.defaults import MAX_BATCH
from canvasrt.engine_profiles import Profiles
from canvasrt.errors import CanvasError, EngineError
from canvasrt.extras import require
from canvasrt.runtime.backends.cuda import CudaDevice
from canvasrt.runtime.bundle_facts import host_dtype
from canvasrt.runtime.engine import EngineCall

PROVIDER = "CUDAExecutionProvider"
# ONNX's element types → the dtype's name in NumPy or ml_dtypes, and the type's number in ONNX.
ELEMENTS = {
    "tensor(float)": ("float32", 1),
    "tensor(float16)": ("float16", 10),
    "tensor(bfloat16)": ("bfloat16", 16),
    "tensor(float8e4m3fn)": ("float8_e4m3fn", 17),
    "tensor(int32)": ("int32", 6),
    "tensor(int64)": ("int64", 7),
    "tensor(bool)": ("bool", 9),
}
# Operators on large tensors. If such an operator ran on the CPU, every pass would copy its tensors. Operators on shapes
# can run on the CPU.
HEAVY = {
    "ArgMax",
    "Attention",
    "CumSum",
    "GatherElements",
    "GatherND",
    "Gelu",
    "MatMul",
    "RMSNormalization",
    "ScatterElements",
    "Softmax",
    "TopK",
}
# maximum number of bindings to keep
CALLS = 256
_INSTALL = (
    "pip uninstall onnxruntime && pip install 'canvasrt[gpu]'; the provider needs CUDA 13 and "
    "cuDNN 9 (pip install nvidia-cudnn-cu13 nvidia-cublas nvidia-cuda-runtime)"
)


class OrtCudaBackend:
    """ONNX Runtime sessions on one stream of the GPU. A heavy operator that cannot run on the GPU is an error."""

    def __init__(self, rows_apart: bool = True, max_batch: int = MAX_BATCH) -> None:
        """Open the GPU. Models will allocate memory for `max_batch` requests.

        Passes are not captured as CUDA graphs: ONNX Runtime computes shapes on the CPU, and therefore refuses capture.

        Raises CanvasError if there is no GPU, or if this ONNX Runtime has no CUDA provider.
        """
        if PROVIDER not in ort.get_available_providers():
            raise CanvasError(
                f"the installed onnxruntime {ort.__version__} has no CUDA provider:"
                " it is the package onnxruntime, not onnxruntime-gpu",
                _INSTALL,
            )
        self.device = CudaDevice("gpu")
        self.rows_apart = rows_apart
        self.max_batch = max_batch
        # The dynamic linker does not search the folders where pip installs CUDA's libraries, so load them first.
        ort.preload_dlls()

    def open_engine(self, name: str, file: Path, profiles: Any) -> OrtCudaEngine:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        provider = {
            "device_id": "0",
            "user_compute_stream": str(self.device.stream),
            # Otherwise the inputs of float32 products are rounded to 10 bits, and tokens differ from the CPU's.
            "use_tf32": "0",
            # Otherwise the arena doubles its size whenever it grows.
            "arena_extend_strategy": "kSameAsRequested",
        }
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(file.parent)
        )
        try:
            session = ort.InferenceSession(
                loadable(file), options, providers=[(PROVIDER, provider), "CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise CanvasError(
                f"ONNX Runtime cannot load {file} on the GPU: {str(error).splitlines()[0]}",
                "check the bundle with `canvasrt verify`, then export it again",
            ) from error
        check_loaded(session.get_providers())
        check_placed(name, on_cpu(session))
        return OrtCudaEngine(name, session, self.max_batch)

    def keep_compiled(self) -> None:
        """Do nothing: ONNX Runtime compiles nothing here."""


def loadable(file: Path) -> bytes:
    """Return a graph in a form that the provider runs; its weights stay in their files."""
    ir = require("onnx_ir", "export")
    from canvasrt.graphs.cuda import widen_argmax

    model = ir.load(file)
    widen_argmax(model)
    return bytes(ir.to_proto(model).SerializeToString())


def check_loaded(providers: Iterable[str]) -> None:
    """Raise CanvasError for a session that silently fell back to the CPU because a library is missing."""
    if PROVIDER not in providers:
        raise CanvasError(
            f"ONNX Runtime's CUDA provider did not load; the graph would run on {', '.join(providers)}",
            _INSTALL,
        )


def on_cpu(session: Any) -> set[str]:
    """Return the operator types that ONNX Runtime placed on the CPU."""
    return {
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == "CPUExecutionProvider"
        for node in part.get_nodes()
    }


def check_placed(name: str, kinds: set[str]) -> None:
    """Raise CanvasError for a session that would copy large tensors to the CPU and back."""
    if heavy := sorted(kinds & HEAVY):
        raise CanvasError(
            f"{name}: this ONNX Runtime has no CUDA kernel for {', '.join(heavy)}",
            "install a newer onnxruntime-gpu, or build engines with TensorRT",
        )


class OrtCudaEngine:
    """A session as an `Engine`, whose inputs and outputs are bound to the call's device addresses."""

    def __init__(
        self,
        name: str,
        session: ort.InferenceSession,
        max_batch: int = MAX_BATCH,
        device_type: str = "cuda",
    ) -> None:
        self.name = name
        self.inputs, self._input_types = _types(session.get_inputs())
        self.outputs, self._output_types = _types(session.get_outputs())
        # The sizes to reserve memory for; graphs accept any size.
        self.profiles = Profiles([{"batch": {"min": 1, "opt": 1, "max": max_batch}}])
        self._session, self._device_type = session, device_type
        self._bound: dict[tuple[Any, ...], Any] = {}  # bindings of repeated calls

    def prepare(self) -> None:
        """Do nothing: sessions allocate memory when they run."""

    def launch(self, call: EngineCall) -> None:
        options = ort.RunOptions()
        # The caller synchronizes the stream.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        try:
            self._session.run_with_iobinding(self._binding(call), options)
        except Exception as error:
            raise EngineError(
                f"{self.name}: ONNX Runtime failed: {str(error).splitlines()[0]}",
                "the GPU's memory may be full: try a smaller --max-context",
            ) from error

    def _binding(self, call: EngineCall) -> Any:
        if not call.repeats:
            return self._bind(call)
        if call.key not in self._bound:
            if len(self._bound) >= CALLS:
                self._bound.clear()
            self._bound[call.key] = self._bind(call)
        return self._bound[call.key]

    def _bind(self, call: EngineCall) -> Any:
        binding = self._session.io_binding()
        for types, bind in (
            (self._input_types, binding.bind_input),
            (self._output_types, binding.bind_output),
        ):
            for name, number in types.items():
                shape, address = call.shapes[name], call.addresses[name]
                bind(name, self._device_type, 0, number, shape, address)
        return binding


def _types(values: Any) -> tuple[dict[str, np.dtype], dict[str, int]]:
    """Return the dtypes of inputs or outputs, and ONNX's numbers for these dtypes, both keyed by name."""
    found = {value.name: ELEMENTS[value.type] for value in values}
    dtypes = {name: host_dtype(dtype) for name, (dtype, _) in found.items()}
    return dtypes, {name: number for name, (_, number) in found.items()}
