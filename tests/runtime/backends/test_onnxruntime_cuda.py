"""ONNX Runtime's CUDA provider never falls back to the CPU silently, and generates the same tokens on a GPU."""

from __future__ import annotations

import onnx
import onnxruntime as ort
import pytest

from canvasrt.errors import CanvasError, UsageError
from canvasrt.machine import gpus
from canvasrt.runtime.backends.onnxruntime_cuda import (
    PROVIDER,
    OrtCudaBackend,
    check_loaded,
    check_placed,
    loadable,
    on_cpu,
)
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from tests.helpers import library
from tests.helpers.reference import Pair
from tests.helpers.resident import Prompt, requests, same

FLOAT = onnx.TensorProto.FLOAT
HAS_PROVIDER = PROVIDER in ort.get_available_providers()


@pytest.mark.skipif(HAS_PROVIDER, reason="this ONNX Runtime has a CUDA provider")
def test_the_wrong_package_is_named(tiny: Pair) -> None:
    with pytest.raises(CanvasError, match="no CUDA provider: it is the package onnxruntime") as bad:
        open_model(tiny.graphs, device="cuda")
    assert "canvasrt[gpu]" in bad.value.hint
    assert "cuDNN 9" in bad.value.hint


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_a_provider_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="needs canvasrt[gpu]")
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER])
    with pytest.raises(CanvasError, match="no GPU can be used"):
        OrtCudaBackend()


def test_a_session_that_fell_back_is_refused() -> None:
    check_loaded([PROVIDER, "CPUExecutionProvider"])
    with pytest.raises(CanvasError, match="the graph would run on CPUExecutionProvider"):
        check_loaded(["CPUExecutionProvider"])


def test_nodes_on_the_cpu_are_found_and_the_heavy_ones_refused(tiny: Pair) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(tiny.graphs)
    )
    session = ort.InferenceSession(
        loadable(tiny.graphs / "body_0.onnx"), options, ["CPUExecutionProvider"]
    )
    kinds = on_cpu(session)
    assert {"MatMul", "TopK"} <= kinds
    with pytest.raises(CanvasError, match=r"body_0: .*no CUDA kernel for .*MatMul.*TopK"):
        check_placed("body_0", kinds)
    check_placed("body_0", {"Shape", "Concat", "Gather"})


@pytest.mark.parametrize("name", ["body_0", "head", "vision"])
def test_graphs_have_no_operator_that_the_provider_lacks(name: str) -> None:
    """The provider has no GatherND for int32, and no ArgMax for bf16."""
    file = library.graphs("demo-vision", "bf16") / f"{name}.onnx"
    onnx.checker.check_model(file, full_check=True)
    model = onnx.load_from_string(loadable(file))
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    floats = {v.name for v in graph.value_info if v.type.tensor_type.elem_type == FLOAT}
    for node in graph.node:
        assert node.op_type != "GatherND"
        assert node.op_type != "ArgMax" or node.input[0] in floats


def test_engines_for_the_cpu_are_not_for_the_gpu(tiny: Pair) -> None:
    with pytest.raises(CanvasError, match="built for the CPU"):
        open_model(tiny.bundle, device="cuda")


def test_an_unknown_device_is_wrong_usage(tiny: Pair) -> None:
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        open_model(tiny.graphs, device="tpu")


@pytest.mark.skipif(not gpus() or not HAS_PROVIDER, reason="needs a GPU and onnxruntime-gpu")
def test_on_a_gpu_tokens_are_those_of_the_cpu(tiny: Pair, prompt: Prompt) -> None:
    model = open_model(tiny.graphs, device="cuda")
    wanted = requests(tiny, prompt, [40, 150])
    same(Generator(model).run(wanted), Generator(tiny.model).run(wanted))
