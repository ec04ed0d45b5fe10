"""The experts' form for a CPU: the same function as the exported one, without a capacity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from canvasrt.bundle import Bundle
from canvasrt.export.graphs import export_graphs
from canvasrt.graphs.experts import SLOTS, split_experts
from canvasrt.runtime.engine import Arrays
from tests.helpers.graph_runs import random_feeds, without_slots

Sessions = tuple[ort.InferenceSession, ort.InferenceSession]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_graphs("demo", tmp_path_factory.mktemp("experts") / "graphs")


@pytest.fixture(scope="module")
def sessions(graphs: Bundle) -> Sessions:
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
def test_the_same_function(
    graphs: Bundle, sessions: Sessions, rows: int, length: int, past: int
) -> None:
    given = random_feeds(graphs.manifest.model, rows, length, past)
    names = [value.name for value in sessions[1].get_outputs()]
    assert set(names) == {value.name for value in sessions[0].get_outputs()} - {"load"}
    for name, before, after in zip(names, *both(sessions, names, given), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4, err_msg=name)


def both(sessions: Sessions, names: list[str], given: Arrays) -> list[list[np.ndarray]]:
    """Return these outputs of both graphs. The rewritten one takes no slots."""
    return [sessions[0].run(names, given), sessions[1].run(names, without_slots(given))]


def test_padding_does_not_matter(graphs: Bundle, sessions: Sessions) -> None:
    given = random_feeds(graphs.manifest.model, 2, 16, 4, padding=6)
    (expected,), (found,) = both(sessions, ["hidden_out"], given)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1, :10], expected[1, :10], rtol=1e-4, atol=1e-4)


def test_no_slots_are_needed(graphs: Bundle, sessions: Sessions) -> None:
    inputs = {value.name for value in sessions[1].get_inputs()}
    assert inputs == {value.name for value in sessions[0].get_inputs()} - set(SLOTS)


def test_other_graphs_stay_as_they_are(graphs: Bundle, tmp_path: Path) -> None:
    model = onnx.load(graphs.file("head.onnx"), load_external_data=False)
    before = model.SerializeToString()
    assert not split_experts(model)
    assert model.SerializeToString() == before
