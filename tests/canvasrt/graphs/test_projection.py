"""The head's two products with the table in FP8: the codes, the rounding, and the lookups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.weight_names import PROJECTION, TABLE
from canvasrt.export.quantize import quantizers
from canvasrt.export.quantize.quantizers import form_of, quantize_in_parts
from canvasrt.graphs import lowbits
from canvasrt.graphs.embedding_table import embedding_entry
from canvasrt.graphs.external import mapped
from canvasrt.graphs.lower import lower_graph
from tests.helpers import quantized as shared
from tests.helpers.quantized import dequantize, quantize_file
from tests.helpers.rounding import from_e4m3, to_e4m3

plain_graphs = shared.plain_graphs
AMAX = 6.0


class Head:
    """The head of `plain_graphs` with its products in FP8, lowered and with their inputs and results as outputs."""

    def __init__(self, graphs: Bundle, folder: Path) -> None:
        source, self.file = graphs.file("head.onnx"), folder / "head.onnx"
        stored = ir.load(source).graph.initializers[TABLE].const_value
        assert isinstance(stored, ir.ExternalTensor)
        shape = tuple(int(size) for size in stored.shape.numpy())
        self.given = lowbits.from_bf16(mapped(stored).view(np.uint16)).reshape(shape)
        parts = (self.given[:40], self.given[40:])
        self.packed = quantize_in_parts(lambda: iter(parts), "fp8", AMAX, TABLE)
        assert self.packed.form == form_of(shape, "fp8")
        (folder / "embedding.bin").hardlink_to(source.with_name("embedding.bin"))
        quantize_file(source, self.file, {TABLE: self.packed.form}, lambda name: self.packed)
        lowered = folder / "lowered"
        lowered.mkdir()
        lower_graph(self.file, lowered / "head.onnx")
        self.model = onnx.load(lowered / "head.onnx", load_external_data=False)
        self.shown = lowered / "shown.onnx"
        graph = self.model.graph
        reads = {PROJECTION}
        reads |= {node.output[0] for node in graph.node if PROJECTION in node.input}
        self.logits, self.soft = (
            node for node in graph.node if node.op_type == "MatMul" and node.input[1] in reads
        )
        makers = {output: node for node in graph.node for output in node.output}
        self.rounds = [makers[product.input[0]] for product in (self.logits, self.soft)]
        for node in (self.logits, self.soft, *self.rounds):
            for value in (node.input[0], node.output[0]):
                graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, None))
        names = {output.name: output for output in graph.output}
        del graph.output[:]
        graph.output.extend(names.values())
        onnx.save(self.model, self.shown)

    def run(self, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        session = ort.InferenceSession(self.shown, options, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_outputs()]
        return dict(zip(names, session.run(names, given), strict=True))


@pytest.fixture(scope="module")
def head(plain_graphs: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head(plain_graphs, tmp_path_factory.mktemp("projection"))


def feeds(width: int, rows: int = 2, length: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "hidden": rng.standard_normal((rows, length, width)).astype("f") * 4,
        "temperature": np.array([0.5, 0.8], "f"),
        "entropy_bound": np.array([0.1, 3.0], "f"),
        "uniforms": rng.random((rows, length)).astype("f"),
        "noise": rng.integers(0, 96, (rows, length)),
    }


def test_one_scale_reaches_the_largest_number(head: Head) -> None:
    assert head.packed.scale == np.float32(np.abs(head.given).max() / 448)
    whole = quantizers.quantize_weight([head.given], "fp8", AMAX)
    np.testing.assert_array_equal(head.packed.values, whole.values)
    error = np.linalg.norm(dequantize(head.packed) - head.given)
    assert error < 0.03 * np.linalg.norm(head.given)


def test_lookups_read_the_table_as_it_was(head: Head, plain_graphs: Bundle) -> None:
    assert embedding_entry(head.file) == embedding_entry(plain_graphs.file("head.onnx"))
    graph = ir.load(head.file).graph
    assert [node.op_type for node, _ in graph.initializers[TABLE].uses()] == ["Gather"]
    stored = graph.initializers[f"{PROJECTION}.values"].const_value
    assert isinstance(stored, ir.ExternalTensor)
    assert stored.location == "head.bin"
    np.testing.assert_array_equal(mapped(stored), head.packed.values.reshape(-1))


def test_both_products_multiply_rounded_inputs_by_the_codes(head: Head) -> None:
    found = head.run(feeds(head.given.shape[1]))
    table = dequantize(head.packed)
    for product, scale, weight in (
        (head.logits, np.float32(AMAX / 448), table.T),
        (head.soft, np.float32(1 / 448), table),
    ):
        maker = head.rounds[0 if product is head.logits else 1]
        x, rounded = found[maker.input[0]], found[product.input[0]]
        expected = from_e4m3(to_e4m3(x / scale)) * scale
        np.testing.assert_array_equal(rounded, expected)
        assert (rounded != x).any()
        np.testing.assert_allclose(found[product.output[0]], rounded @ weight, rtol=1e-4, atol=1e-4)
    assert found[head.rounds[1].input[0]].max() == 1.0


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf")])
def test_an_input_that_was_never_seen_is_refused(head: Head, amax: float) -> None:
    from canvasrt.errors import CanvasError

    with pytest.raises(CanvasError, match="table: its input's largest magnitude"):
        quantize_in_parts(lambda: [head.given], "fp8", amax, TABLE)
