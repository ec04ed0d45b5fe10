"""Graphs rewritten for a CPU compute the same as the exported graphs, in fewer nodes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import xor
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.graphs.cpu import rewrite_graph
from canvasrt.graphs.cpu_experts import split_experts
from canvasrt.graphs.cpu_sampler import shorten_sampler
from canvasrt.graphs.edit import insert, made_by, user
from canvasrt.graphs.geometry import split_geometry
from canvasrt.graphs.lower import lower_graph
from canvasrt.graphs.names import DOMAIN, SLOTS
from canvasrt.graphs.nbits import use_nbits
from canvasrt.graphs.simplify import simplify_layers
from canvasrt.runtime.body_inputs import Geometry
from tests.helpers import library
from tests.helpers.graph_runs import head_feeds, random_feeds, without_slots

POSITIONAL = ("positions", "groups", "causal", "past_positions")
Feeds = dict[str, np.ndarray]


class Session:
    """An ONNX Runtime session with the interface of a segment, as `Geometry` expects it."""

    def __init__(self, model: ir.Model, folder: Path, name: str) -> None:
        file, optimized = folder / f"{name}.onnx", folder / f"{name}.optimized"
        ir.save(model, file)
        onnx.checker.check_model(file)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(optimized)
        self._session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(optimized, load_external_data=False).graph.node
        self.name, self.kinds = name, Counter(node.op_type for node in nodes)
        self.inputs = frozenset(each.name for each in self._session.get_inputs())
        self.outputs = tuple(each.name for each in self._session.get_outputs())

    def run(self, feeds: Feeds, wanted: list[str] | None = None) -> Feeds:
        names = list(wanted or self.outputs)
        given = {name: feeds[name] for name in self.inputs}
        return dict(zip(names, self._session.run(names, given), strict=True))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The demo's graphs, with its four layers in two body segments."""
    folder = tmp_path_factory.mktemp("cpu") / "graphs"
    shutil.copytree(library.graphs("demo", layers_per_segment=2), folder)
    return load_bundle(folder, check=False)


def bodies(graphs: Bundle, *steps: Callable[[ir.Model], bool]) -> list[ir.Model]:
    """Return the body graphs after some rewriting steps."""
    files = [graphs.file(entry["file"]) for entry in graphs.manifest.segments if "layers" in entry]
    models = [ir.load(file) for file in files]
    for model in models:
        assert all([step(model) for step in steps])  # noqa: C419
    return models


def sessions(graphs: Bundle, name: str, *steps: Callable[[ir.Model], bool]) -> list[Session]:
    return [
        Session(model, graphs.path, f"{name}_{number}")
        for number, model in enumerate(bodies(graphs, *steps))
    ]


@pytest.fixture(scope="module")
def split(graphs: Bundle) -> list[Session]:
    return sessions(graphs, "split", split_experts)


@pytest.fixture(scope="module")
def simple(graphs: Bundle) -> list[Session]:
    return sessions(graphs, "simple", split_experts, simplify_layers)


@pytest.fixture(scope="module")
def cut(graphs: Bundle) -> tuple[Geometry, list[Session]]:
    """The graph that computes position-dependent values, and the bodies that read them."""
    models = bodies(graphs, split_experts, simplify_layers)
    geometry = Session(split_geometry(models), graphs.path, "geometry")
    names = [f"cut_{number}" for number in range(len(models))]
    parts = zip(models, names, strict=True)
    return Geometry(geometry), [Session(model, graphs.path, name) for model, name in parts]


def compare(before: Feeds, after: Feeds, real: np.ndarray, tolerance: float) -> None:
    assert before.keys() - {"load"} == after.keys()
    for name, found in after.items():
        expected = before[name]
        if name.startswith("new_"):  # [B, heads, L, d]
            expected, found = expected.swapaxes(1, 2), found.swapaxes(1, 2)
        # The outputs of padding are undefined.
        expected, found = expected[real], found[real]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=name)


# With a single token, most experts have no row.
@pytest.mark.parametrize(
    ("rows", "length", "past", "padding"), [(1, 1, 0, 0), (2, 16, 4, 6), (3, 40, 9, 0)]
)
def test_experts_by_their_own_rows(
    graphs: Bundle, split: list[Session], rows: int, length: int, past: int, padding: int
) -> None:
    given = random_feeds(graphs.manifest.model, rows, length, past, padding)
    for before, after in zip(sessions(graphs, "exported"), split, strict=True):
        assert after.inputs == before.inputs - set(SLOTS)
        compare(before.run(given), after.run(given), given["positions"] >= 0, 1e-4)


@pytest.mark.parametrize("padding", [0, 4])
def test_layers_in_fewer_nodes(
    graphs: Bundle,
    split: list[Session],
    simple: list[Session],
    cut: tuple[Geometry, list[Session]],
    padding: int,
) -> None:
    given = without_slots(random_feeds(graphs.manifest.model, 3, 24, 9, padding))
    given["causal"] = np.array([True, False, True])
    given["groups"][0, :5] = 3  # tokens of an image, which see each other
    real = given["positions"] >= 0
    geometry, parts = cut
    completed = geometry.complete(given)
    moved = geometry.complete(dict(given, positions=given["positions"] + 1))
    for before, after, part in zip(split, simple, parts, strict=True):
        expected = before.run(given)
        compare(expected, after.run(given), real, 1e-4)
        assert not [name for name in part.inputs if name.startswith(POSITIONAL)]
        compare(after.run(given), part.run(completed), real, 0)
        # With other phases or positions, results differ, so the comparison is meaningful.
        others = before.run(given | {"causal": ~given["causal"]}), part.run(moved)
        for other in others:
            assert not np.allclose(
                other["hidden_out"][real], expected["hidden_out"][real], atol=1e-3
            )


def test_each_question_is_asked_once(
    graphs: Bundle, split: list[Session], simple: list[Session]
) -> None:
    layers = len(graphs.manifest.model.layers) // 2
    for before, after in zip(split, simple, strict=True):
        check(layers, after.kinds)
        assert after.kinds.total() < 0.82 * before.kinds.total()
        # A layer keeps eight `Mul` nodes: for queries, keys, both gates, the experts' norm, weights and order, and the
        # layer's scalar.
        assert after.kinds["Mul"] <= 8 * layers + 6


def check(layers: int, found: Counter[str]) -> None:
    assert found["RotaryEmbedding"] == 2 * layers  # one for queries, one for keys
    assert found["Softmax"] == layers  # the router's; attention's is inside a fused node
    assert found["SkipSimplifiedLayerNormalization"] == 2 * layers
    assert not found["Neg"], "a rotation was not recognised"
    # A layer has five splits: one for heads, two for gates, and two for the experts' rows. Only positions are sliced.
    assert found["Split"] == 5 * layers
    assert found["Slice"] <= 3
    # There is one mask and one rotation per kind of layer.
    assert found["LessOrEqual"] == found["Cos"] == found["Sin"] <= 2
    assert found["Range"] == 1  # it numbers the rows for sorting


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_lowered_layers_too(
    quantized: Callable, plain_graphs: Bundle, tmp_path: Path, format: str
) -> None:
    lower_graph(quantized(format).file, tmp_path / "body_0.onnx")
    model = ir.load(tmp_path / "body_0.onnx")
    assert split_experts(model)
    assert use_nbits(model) == (format == "int4")
    assert simplify_layers(model)
    config = plain_graphs.manifest.model
    check(len(config.layers), Session(model, tmp_path, "simple").kinds)


def test_bodies_share_what_is_equal(graphs: Bundle) -> None:
    apart = [split_geometry([model]) for model in bodies(graphs, split_experts, simplify_layers)]
    models = bodies(graphs, split_experts, simplify_layers)
    together = split_geometry(models)
    kinds = Counter(node.op_type for node in together.graph)
    # There is one rotation and one mask per kind of layer.
    assert kinds["Cos"] == kinds["Sin"] == kinds["LessOrEqual"] == 2
    assert len(together.graph) < 0.7 * sum(len(each.graph) for each in apart)
    # The layers' weights keep their names, by which quality reports compare them with the checkpoint.
    for model in models:
        assert {f"layers.{i}.encoder_scalar" for i in range(2)} <= model.graph.initializers.keys()


def test_lengths_have_memory_plans_of_their_own(
    graphs: Bundle, cut: tuple[Geometry, list[Session]]
) -> None:
    """ONNX Runtime identifies a memory plan by the exclusive or of the sizes, so two lengths could share a plan. With
    the plan of another length, passes are 7% slower."""
    geometry, parts = cut
    for body in parts:
        keys = set()
        for length in (16, 24, 32):
            given = without_slots(random_feeds(graphs.manifest.model, 1, length, 9))
            completed = geometry.complete(given)
            keys.add(reduce(xor, [s for name in body.inputs for s in completed[name].shape]))
        assert len(keys) == 3


def test_the_sampler_takes_fewer_passes(graphs: Bundle) -> None:
    model = ir.load(graphs.file("head.onnx"))
    before = Session(model, graphs.path, "whole_head")
    assert shorten_sampler(model)
    # The rewriting finds constants wherever the exporter wrote them.
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["LogSoftmax"] == kinds["Exp"] == kinds["Tanh"] == 1
    assert not kinds["ReduceMax"] + kinds["Log"]
    assert kinds["Div"] == 2  # hidden / cap, cap / temperature
    assert kinds["ReduceSum"] == 4  # two sum entropies and rows, and two count tokens
    after = Session(model, graphs.path, "short_head")
    given = head_feeds(graphs.manifest.model, 3, graphs.manifest.model.canvas_length)
    for temperature in (0.4, 0.8, 1e-6):
        given["temperature"][0] = temperature
        expected, found = before.run(given), after.run(given)
        for name in ("argmax", "accepted", "canvas"):
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        np.testing.assert_allclose(found["entropy"], expected["entropy"], rtol=1e-5, atol=2e-6)
        hidden = found["next_hidden"], expected["next_hidden"]
        np.testing.assert_allclose(*hidden, rtol=1e-4, atol=1e-4)


def test_probabilities_that_are_rounded_stay_unnormalised(graphs: Bundle) -> None:
    model = ir.load(graphs.file("head.onnx"))
    (exp,) = (node for node in model.graph if node.op_type == "Exp")
    soft = user(exp.outputs[0], "MatMul")
    rounded = insert(soft, "Round", [soft.inputs[0], soft.inputs[1]], "rounded", domain=DOMAIN)
    soft.replace_input_with(0, rounded)
    assert made_by(soft.inputs[0], "Round")
    assert_unchanged(model, shorten_sampler)


def test_other_graphs_stay_as_they_are(graphs: Bundle) -> None:
    assert_unchanged(ir.load(graphs.file("head.onnx")), split_experts)
    assert_unchanged(ir.load(graphs.file("head.onnx")), simplify_layers)
    assert_unchanged(ir.load(graphs.file("body_0.onnx")), shorten_sampler)
    assert_unchanged(ir.load(graphs.file("vision.onnx")), rewrite_graph)


def assert_unchanged(model: ir.Model, step: Callable[[ir.Model], bool]) -> None:
    before = ir.to_proto(model).SerializeToString()
    assert not step(model)
    assert ir.to_proto(model).SerializeToString() == before
