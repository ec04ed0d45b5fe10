"""The embedding table in INT8 or FP8: codes, rounding, pieces on a CPU, and lookups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.weight_names import PROJECTION, TABLE
from canvasrt.errors import CanvasError
from canvasrt.export.quantize.quantizers import form_of, quantize_in_parts, quantize_weight
from canvasrt.graphs import embedding_table, lowbits
from canvasrt.graphs.embedding_table import embedding_entry, split_table
from canvasrt.graphs.external import mapped
from canvasrt.graphs.lower import lower_graph
from canvasrt.graphs.names import TABLE_VALUES
from canvasrt.runtime.bundle_facts import map_table
from tests.helpers.graph_runs import head_feeds, run_graph, show
from tests.helpers.quantized import dequantize, quantize_file
from tests.helpers.rounding import from_e4m3, to_e4m3

AMAX = 6.0


class Head:
    """The head of `plain_graphs` with its table in INT8, or with the products of the table in FP8; and its lowered
    form."""

    def __init__(self, graphs: Bundle, folder: Path, format: str) -> None:
        source, self.file = graphs.file("head.onnx"), folder / "head.onnx"
        self.config = graphs.manifest.model
        stored = ir.load(source).graph.initializers[TABLE].const_value
        assert isinstance(stored, ir.ExternalTensor)
        shape = tuple(int(size) for size in stored.shape.numpy())
        self.given = lowbits.from_bf16(mapped(stored).view(np.uint16)).reshape(shape)
        # Quantized in two parts, as large tables are.
        parts = (self.given[:40], self.given[40:])
        if format == "fp8":
            self.packed = quantize_in_parts(lambda: iter(parts), format, AMAX, TABLE)
            (folder / "embedding.bin").hardlink_to(source.with_name("embedding.bin"))
        else:
            self.packed = quantize_weight(iter(parts), format, None)
        assert self.packed.form == form_of(shape, format)
        quantize_file(source, self.file, {TABLE: self.packed.form}, lambda name: self.packed)
        self.lowered = folder / "lowered" / "head.onnx"
        self.lowered.parent.mkdir()
        lower_graph(self.file, self.lowered)

    def feeds(self) -> dict[str, np.ndarray]:
        return head_feeds(self.config, 2, 8, scale=4)


@pytest.fixture(scope="module")
def int8(plain_graphs: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head(plain_graphs, tmp_path_factory.mktemp("int8"), "int8")


@pytest.fixture(scope="module")
def fp8(plain_graphs: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head(plain_graphs, tmp_path_factory.mktemp("fp8"), "fp8")


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in ("canvas", "argmax", "accepted"):
        np.testing.assert_array_equal(found[name], expected[name])
    for name in ("entropy", "next_hidden"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)
    assert len(np.unique(expected["argmax"])) > 4


def test_int8_has_a_scale_for_each_row_and_the_table_s_file(int8: Head) -> None:
    found, packed = dequantize(int8.packed), int8.packed
    scale = np.abs(int8.given).max(axis=1) / np.float32(127)
    np.testing.assert_allclose(packed.scale, scale, rtol=2**-8)
    assert (np.abs(found - int8.given) <= 0.51 * packed.scale[:, None]).all()
    entry = embedding_entry(int8.file)
    data = (int8.file.parent / "embedding.bin").read_bytes()
    assert (entry["shape"], entry["dtype"]) == (list(int8.given.shape), "int8")
    assert entry["scale"]["dtype"] == "bfloat16"
    assert data.startswith(packed.values.tobytes())
    assert data[entry["scale"]["offset"] :] == lowbits.to_bf16(packed.scale).tobytes()


def test_the_host_reads_the_same_rows(int8: Head) -> None:
    tokens = np.array([[0, 95, 41], [3, 3, 40]])
    for file in (int8.file, int8.lowered):
        manifest = SimpleNamespace(embedding=embedding_entry(file))
        bundle = SimpleNamespace(manifest=manifest, path=file.parent, file=file.parent.joinpath)
        found = map_table(bundle)[tokens]  # type: ignore[arg-type]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, dequantize(int8.packed)[tokens])


def test_the_head_computes_with_what_the_codes_stand_for(
    plain_graphs: Bundle, int8: Head, tmp_path: Path
) -> None:
    lower_graph(plain_graphs.file("head.onnx"), tmp_path / "head.onnx")
    (tmp_path / "embedding.bin").write_bytes(dequantize(int8.packed).astype("f").tobytes())
    given = int8.feeds()
    same(run_graph(int8.lowered, given), run_graph(tmp_path / "head.onnx", given))


@pytest.mark.parametrize("pieces", [1, 5])
def test_in_pieces_it_computes_the_same(
    int8: Head, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    size = 96 * int8.config.hidden_size * 4
    monkeypatch.setattr(embedding_table, "TABLE_PIECE_BYTES", -(-size // pieces))
    edited, table = ir.load(int8.lowered), int8.lowered.with_name("embedding.bin")
    before = table.read_bytes()
    assert split_table(edited)
    assert not split_table(ir.Model(ir.Graph([], [], nodes=[]), ir_version=11))
    split = int8.lowered.with_name(f"split_{pieces}.onnx")
    ir.save(edited, split)
    onnx.checker.check_model(split)
    graph = ir.to_proto(edited).graph
    wide = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    # Both products share initializers, so the codes are mapped once. Lookups have a separate initializer.
    codes = [each for each in graph.initializer if each.name.startswith(f"{TABLE_VALUES}.")]
    assert len(codes) == pieces
    assert sum(each.dims[0] for each in codes) == 96
    # The two products have separate scales. Otherwise, they would share dequantized pieces, which would stay in memory.
    assert len({node.input[1] for node in wide}) == len(wide) == 2 * pieces + 1
    assert table.read_bytes() == before
    given = int8.feeds()
    same(run_graph(split, given), run_graph(int8.lowered, given))


def test_fp8_has_one_scale_which_reaches_the_largest_number(fp8: Head) -> None:
    assert fp8.packed.scale == np.float32(np.abs(fp8.given).max() / 448)
    whole = quantize_weight([fp8.given], "fp8", AMAX)
    np.testing.assert_array_equal(fp8.packed.values, whole.values)
    error = np.linalg.norm(dequantize(fp8.packed) - fp8.given)
    assert error < 0.03 * np.linalg.norm(fp8.given)


def test_lookups_read_the_table_as_it_was(fp8: Head, plain_graphs: Bundle) -> None:
    assert embedding_entry(fp8.file) == embedding_entry(plain_graphs.file("head.onnx"))
    graph = ir.load(fp8.file).graph
    assert [node.op_type for node, _ in graph.initializers[TABLE].uses()] == ["Gather"]
    stored = graph.initializers[f"{PROJECTION}.values"].const_value
    assert isinstance(stored, ir.ExternalTensor)
    assert stored.location == "head.bin"
    np.testing.assert_array_equal(mapped(stored), fp8.packed.values.reshape(-1))


def test_both_products_multiply_rounded_inputs_by_the_codes(fp8: Head) -> None:
    model = onnx.load(fp8.lowered, load_external_data=False)
    makers = {output: node for node in model.graph.node for output in node.output}
    reads = {PROJECTION, *(n.output[0] for n in model.graph.node if PROJECTION in n.input)}
    products = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in reads]
    rounds = [makers[product.input[0]] for product in products]
    shown = fp8.lowered.with_name("shown.onnx")
    show(model, shown, [*products, *rounds])
    found, table = run_graph(shown, fp8.feeds()), dequantize(fp8.packed)
    each = zip(products, rounds, (AMAX, 1), (table.T, table), strict=True)
    for product, maker, most, weight in each:
        scale = np.float32(most / 448)
        x, rounded = found[maker.input[0]], found[product.input[0]]
        np.testing.assert_array_equal(rounded, from_e4m3(to_e4m3(x / scale)) * scale)
        assert (rounded != x).any()
        np.testing.assert_allclose(found[product.output[0]], rounded @ weight, rtol=1e-4, atol=1e-4)
    assert found[rounds[1].input[0]].max() == 1.0


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf")])
def test_an_input_that_was_never_seen_is_refused(fp8: Head, amax: float) -> None:
    with pytest.raises(CanvasError, match="table: its input's largest magnitude"):
        quantize_in_parts(lambda: [fp8.given], "fp8", amax, TABLE)
