"""Layers in fewer nodes: they compute the same, and what all layers ask is answered once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.export.graphs import export_graphs
from canvasrt.graphs.experts import split_experts
from canvasrt.graphs.lower import lower_graph
from canvasrt.graphs.nbits import use_nbits
from canvasrt.graphs.simplify import simplify_layers
from tests.helpers import quantized as shared
from tests.helpers.graph_runs import random_feeds, without_slots

plain_graphs, quantized = shared.plain_graphs, shared.quantized


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The demo's, with three sliding layers and a full one."""
    return export_graphs("demo", tmp_path_factory.mktemp("layers") / "graphs")


def opened(model: onnx.ModelProto, folder: Path, name: str) -> ort.InferenceSession:
    """Open a graph beside its weights. ONNX Runtime writes what it makes of it to `name`.optimized."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / f"{name}.optimized")
    onnx.save(model, folder / name)
    return ort.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"])


def kinds(folder: Path, name: str) -> Counter[str]:
    made = onnx.load(folder / f"{name}.optimized", load_external_data=False)
    return Counter(node.op_type for node in made.graph.node)


@pytest.fixture(scope="module")
def plain(graphs: Bundle) -> tuple[ort.InferenceSession, ort.InferenceSession, Path]:
    """The body with its experts split, and simplified as well."""
    file = graphs.file("body_0.onnx")
    model = onnx.load(file, load_external_data=False)
    assert split_experts(model)
    before = opened(model, file.parent, "split.onnx")
    assert simplify_layers(model)
    return before, opened(model, file.parent, "simple.onnx"), file.parent


@pytest.mark.parametrize("padding", [0, 4])
def test_the_same_function(graphs: Bundle, plain, padding: int) -> None:
    given = without_slots(random_feeds(graphs.manifest.model, 3, 24, 9, padding))
    given["causal"] = np.array([True, False, True])
    before, after, _ = plain
    real = given["positions"] >= 0
    for name in (value.name for value in before.get_outputs()):
        expected, found = before.run([name], given)[0], after.run([name], given)[0]
        if name == "hidden_out":
            expected, found = expected[real], found[real]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    # Both phases are in the batch, or a scalar of the wrong one would not show.
    other = before.run(["hidden_out"], given | {"causal": ~given["causal"]})[0]
    assert not np.allclose(other[real], before.run(["hidden_out"], given)[0][real], atol=1e-2)


def test_each_question_is_asked_once(graphs: Bundle, plain) -> None:
    check(graphs.manifest.model, kinds(plain[2], "simple.onnx"))
    split = kinds(plain[2], "split.onnx")
    simple = kinds(plain[2], "simple.onnx")
    assert simple.total() < 0.71 * split.total()
    # A layer has these left: queries, keys, both gates, the experts' norm, weights, order and the layer's scalar.
    assert simple["Mul"] <= 8 * len(graphs.manifest.model.layers) + 6


def check(config: ModelConfig, found: Counter[str]) -> None:
    layers = len(config.layers)
    assert found["RotaryEmbedding"] == 2 * layers  # queries and keys
    assert found["Softmax"] == layers  # the router's; attention has its own inside
    assert found["SkipSimplifiedLayerNormalization"] == 2 * layers
    assert not found["Neg"], "a rotation was not recognised"
    # Heads, both gates, and the experts' rows twice; what is sliced is positions.
    assert found["Split"] == 5 * layers
    assert found["Slice"] <= 3
    # One mask for sliding layers and one for full ones, and their two rotations.
    assert found["LessOrEqual"] == found["Cos"] == found["Sin"] == 2
    assert found["Range"] == 1  # the numbers of the rows to sort


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_lowered_layers_too(
    quantized: Callable, plain_graphs: Bundle, tmp_path: Path, format: str
) -> None:
    lowered = tmp_path / "body_0.onnx"
    lower_graph(quantized(format).file, lowered)
    model = onnx.load(lowered, load_external_data=False)
    split_experts(model)
    use_nbits(model)
    opened(model, tmp_path, "split.onnx")
    assert simplify_layers(model)
    opened(model, tmp_path, "simple.onnx")
    check(plain_graphs.manifest.model, kinds(tmp_path, "simple.onnx"))


def test_a_head_stays_as_it_is(plain_graphs: Bundle) -> None:
    model = onnx.load(plain_graphs.file("head.onnx"), load_external_data=False)
    before = model.SerializeToString()
    assert not simplify_layers(model)
    assert model.SerializeToString() == before
