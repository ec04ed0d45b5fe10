"""The experts' form for a CPU: the same function as the exported one, without a capacity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from canvasrt.bundle import Bundle
from canvasrt.export.graphs import export_graphs
from canvasrt.graphs.experts import split_experts
from canvasrt.runtime.body_inputs import expert_slots
from tests.helpers.graph_runs import random_feeds


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_graphs("demo", tmp_path_factory.mktemp("experts") / "graphs")


@pytest.fixture(scope="module")
def sessions(graphs: Bundle) -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """The body graph as exported, and rewritten."""
    file = graphs.file("body_0.onnx")
    model = onnx.load(file, load_external_data=False)
    assert split_experts(model)
    rewritten = file.with_name("rewritten.onnx")
    onnx.save(model, rewritten)
    onnx.checker.check_model(rewritten)
    return ort.InferenceSession(file), ort.InferenceSession(rewritten)


# One token leaves most experts without a row.
@pytest.mark.parametrize(("rows", "length", "past"), [(1, 1, 0), (1, 32, 5), (3, 40, 9)])
def test_the_same_function(graphs: Bundle, sessions, rows: int, length: int, past: int) -> None:
    given = random_feeds(graphs.manifest.model, rows, length, past)
    expected, found = (session.run(None, given) for session in sessions)
    names = [value.name for value in sessions[0].get_outputs()]
    for name, before, after in zip(names, expected, found, strict=True):
        if name != "load":
            np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4, err_msg=name)


def test_padding_does_not_matter(graphs: Bundle, sessions) -> None:
    given = random_feeds(graphs.manifest.model, 2, 16, 4, padding=6)
    expected, found = (session.run(["hidden_out"], given)[0] for session in sessions)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1, :10], expected[1, :10], rtol=1e-4, atol=1e-4)


def test_no_capacity_is_needed(graphs: Bundle, sessions) -> None:
    given = random_feeds(graphs.manifest.model, 1, 32, 0)
    narrow_slots = expert_slots(1, graphs.manifest.model.num_experts)
    wide = sessions[1].run(["hidden_out", "load"], given)
    narrow = sessions[1].run(["hidden_out", "load"], given | narrow_slots)
    assert (wide[0] == narrow[0]).all()
    assert narrow[1].tolist() == [0] * len(graphs.manifest.model.layers)
    exported = sessions[0].run(["load"], given | narrow_slots)[0]
    assert (exported > 1).all(), "or the comparison says nothing"


def test_other_graphs_stay_as_they_are(graphs: Bundle, tmp_path: Path) -> None:
    model = onnx.load(graphs.file("head.onnx"), load_external_data=False)
    before = model.SerializeToString()
    assert not split_experts(model)
    assert model.SerializeToString() == before
