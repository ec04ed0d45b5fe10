"""What positions alone decide, moved out of bodies: they compute the same bits, in fewer nodes."""

from __future__ import annotations

from functools import reduce
from operator import xor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto

from canvasrt.bundle import Bundle
from canvasrt.export.graphs import export_graphs
from canvasrt.graphs.experts import split_experts
from canvasrt.graphs.geometry import split_geometry
from canvasrt.graphs.simplify import simplify_layers
from canvasrt.runtime.body_inputs import Geometry
from tests.helpers.graph_runs import random_feeds, without_slots

POSITIONAL = ("positions", "groups", "causal", "past_positions")


class OrtSession:
    """A session as the segment that `Geometry` runs."""

    def __init__(self, model: ModelProto, file: Path) -> None:
        onnx.save(model, file)
        self._session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.name = file.stem
        self.inputs = frozenset(each.name for each in self._session.get_inputs())
        self.outputs = tuple(each.name for each in self._session.get_outputs())

    def run(self, feeds, wanted=None):
        names = list(wanted or self.outputs)
        given = {name: feeds[name] for name in self.inputs}
        return dict(zip(names, self._session.run(names, given), strict=True))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The demo's, with its sliding and its full layers in two bodies each."""
    return export_graphs("demo", tmp_path_factory.mktemp("geometry") / "graphs", 2)


def prepared(graphs: Bundle) -> list[ModelProto]:
    """The bodies as a build for a CPU splits them."""
    models = []
    for entry in graphs.manifest.segments:
        if "layers" in entry:
            model = onnx.load(graphs.file(entry["file"]), load_external_data=False)
            split_experts(model)
            simplify_layers(model)
            models.append(model)
    return models


def on_images(feeds: dict[str, np.ndarray]) -> None:
    """Make the first tokens of the first row those of an image, which see each other."""
    feeds["groups"][0, :5] = 3


@pytest.mark.parametrize("padding", [0, 4])
def test_the_same_bits(graphs: Bundle, padding: int) -> None:
    whole, cut, folder = prepared(graphs), prepared(graphs), graphs.path
    geometry = Geometry(OrtSession(split_geometry(cut, folder), folder / "geometry.onnx"))
    feeds = without_slots(random_feeds(graphs.manifest.model, 3, 24, 9, padding))
    feeds["causal"] = np.array([True, False, True])
    on_images(feeds)
    completed = geometry.complete(feeds)
    real = feeds["positions"] >= 0
    for number, (old, new) in enumerate(zip(whole, cut, strict=True)):
        before = OrtSession(old, folder / f"before_{number}.onnx")
        after = OrtSession(new, folder / f"after_{number}.onnx")
        assert not [name for name in after.inputs if name.startswith(POSITIONAL)]
        assert before.outputs == after.outputs
        expected, found = before.run(feeds), after.run(completed)
        for name in before.outputs:
            pair = expected[name], found[name]
            if name == "hidden_out":
                pair = expected[name][real], found[name][real]
            np.testing.assert_array_equal(*pair, err_msg=name)
        moved = dict(feeds, positions=feeds["positions"] + 1)
        other = after.run(geometry.complete(moved))["hidden_out"]
        assert not np.allclose(other[real], expected["hidden_out"][real], atol=1e-3)


def test_bodies_share_what_is_equal(graphs: Bundle) -> None:
    apart = [split_geometry([model], graphs.path) for model in prepared(graphs)]
    cut = prepared(graphs)
    together = split_geometry(cut, graphs.path)
    kinds = [node.op_type for node in together.graph.node]
    # One rotation per kind of layer, and one mask.
    assert kinds.count("Cos") == kinds.count("Sin") == kinds.count("LessOrEqual") == 2
    most = sum(len(each.graph.node) for each in apart)
    assert len(together.graph.node) < 0.7 * most
    # Weights of layers stay where a comparison with the checkpoint looks for them.
    for number, model in enumerate(cut):
        held = {each.name for each in model.graph.initializer}
        assert {f"layers.{i}.encoder_scalar" for i in range(2)} <= held, number


def test_lengths_have_memory_plans_of_their_own(graphs: Bundle) -> None:
    """Or a pass would run with the plan of another length, 7% slower: ONNX Runtime's key is the sizes' exclusive or."""
    folder, cut = graphs.path, prepared(graphs)
    geometry = Geometry(OrtSession(split_geometry(cut, folder), folder / "geometry.onnx"))
    for number, model in enumerate(cut):
        body, keys = OrtSession(model, folder / f"after_{number}.onnx"), set()
        for length in (16, 24, 32):
            given = without_slots(random_feeds(graphs.manifest.model, 1, length, 9))
            completed = geometry.complete(given)
            sizes = [size for name in body.inputs for size in completed[name].shape]
            keys.add(reduce(xor, sizes))
        assert len(keys) == 3
