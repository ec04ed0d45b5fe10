"""The sampler in fewer passes over the vocabulary: it computes the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from canvasrt.bundle import Bundle
from canvasrt.export.graphs import export_graphs
from canvasrt.graphs.experts import DOMAIN
from canvasrt.graphs.protos import replace, users
from canvasrt.graphs.sampler import shorten_sampler


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    """The demo's graphs, and its head rewritten."""
    graphs = export_graphs("demo", tmp_path_factory.mktemp("sampler") / "graphs")
    model = onnx.load(graphs.file("head.onnx"), load_external_data=False)
    assert shorten_sampler(model)
    onnx.save(model, graphs.path / "short.onnx")
    onnx.checker.check_model(graphs.path / "short.onnx")
    return graphs, graphs.path / "short.onnx"


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1e-6])
def test_the_same_function(head: tuple[Bundle, Path], temperature: float) -> None:
    graphs, short = head
    config = graphs.manifest.model
    rng = np.random.default_rng(3)
    shape = 3, config.canvas_length
    given = {
        "hidden": rng.standard_normal((*shape, config.hidden_size)).astype(np.float32),
        "temperature": np.array([temperature, 0.9, 0.5], np.float32),
        "entropy_bound": np.array([0.1, 1.0, 5.0], np.float32),
        "uniforms": rng.random(shape, np.float32),
        "noise": rng.integers(0, config.vocab_size, shape),
    }
    before, after = (ort.InferenceSession(each) for each in (graphs.file("head.onnx"), short))
    names = [value.name for value in before.get_outputs()]
    expected = dict(zip(names, before.run(names, given), strict=True))
    found = dict(zip(names, after.run(names, given), strict=True))
    np.testing.assert_allclose(found["entropy"], expected["entropy"], rtol=1e-5, atol=2e-6)
    for name in ("argmax", "accepted", "canvas"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    np.testing.assert_allclose(found["next_hidden"], expected["next_hidden"], rtol=1e-4, atol=1e-4)


def test_it_takes_fewer_passes(head: tuple[Bundle, Path]) -> None:
    kinds = Counter(
        node.op_type for node in onnx.load(head[1], load_external_data=False).graph.node
    )
    assert kinds["LogSoftmax"] == kinds["Exp"] == kinds["Tanh"] == 1
    assert not kinds["ReduceMax"] + kinds["Log"]
    # Of hidden states by the cap, and of the cap by the temperature.
    assert kinds["Div"] == 2
    # The entropy's, that of rows of the vocabulary, and two that count tokens.
    assert kinds["ReduceSum"] == 4


def test_probabilities_that_are_rounded_stay_unnormalised(head: tuple[Bundle, Path]) -> None:
    model = onnx.load(head[0].file("head.onnx"), load_external_data=False)
    (exp,) = (node for node in model.graph.node if node.op_type == "Exp")
    (soft,) = (each for each in users(model.graph, exp.output[0]) if each.op_type == "MatMul")
    rounded = helper.make_node("Round", [soft.input[0], "scale"], ["rounded"], domain=DOMAIN)
    soft.input[0] = "rounded"
    replace(model.graph, soft, [rounded, soft])
    before = model.SerializeToString()
    assert not shorten_sampler(model)
    assert model.SerializeToString() == before


def test_a_body_stays_as_it_is(head: tuple[Bundle, Path]) -> None:
    model = onnx.load(head[0].file("body_0.onnx"), load_external_data=False)
    before = model.SerializeToString()
    assert not shorten_sampler(model)
    assert model.SerializeToString() == before
