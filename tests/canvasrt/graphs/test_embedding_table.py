"""An INT8 table: the head's products with it, in pieces on a CPU, and the host's lookups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from canvasrt.bundle import Bundle
from canvasrt.export.quantize.packed import Packed
from canvasrt.export.quantize.quantizers import form_of, quantize_weight
from canvasrt.graphs import embedding_table, lowbits
from canvasrt.graphs.embedding_table import embedding_entry, split_table
from canvasrt.graphs.external import mapped
from canvasrt.graphs.lower import lower_graph
from canvasrt.graphs.names import TABLE_VALUES
from canvasrt.runtime.bundle_facts import map_table
from tests.helpers import quantized as shared
from tests.helpers.quantized import dequantize, quantize_file

plain_graphs = shared.plain_graphs


class Head:
    """The head of `plain_graphs` with its table in INT8, and the dequantized table."""

    def __init__(self, graphs: Bundle, folder: Path) -> None:
        self.file, source = folder / "head.onnx", graphs.file("head.onnx")
        stored = ir.load(source).graph.initializers["table"].const_value
        assert isinstance(stored, ir.ExternalTensor)
        shape = tuple(int(size) for size in stored.shape.numpy())
        self.given = lowbits.from_bf16(mapped(stored).view(np.uint16)).reshape(shape)
        # In two parts, like larger tables.
        parts = (self.given[:40], self.given[40:])
        self.packed: Packed = quantize_weight(iter(parts), "int8", None)
        assert self.packed.form == form_of(shape, "int8")
        quantize_file(source, self.file, {"table": self.packed.form}, lambda name: self.packed)


@pytest.fixture(scope="module")
def head(plain_graphs: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head(plain_graphs, tmp_path_factory.mktemp("head"))


@pytest.fixture
def lowered(head: Head, tmp_path: Path) -> Path:
    lower_graph(head.file, tmp_path / "head.onnx")
    return tmp_path / "head.onnx"


def feeds(config: object, rows: int = 2, length: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    size = config.hidden_size  # type: ignore[attr-defined]
    return {
        "hidden": rng.standard_normal((rows, length, size)).astype("f") * 4,
        "temperature": np.array([0.5, 0.8], "f"),
        "entropy_bound": np.array([0.1, 3.0], "f"),
        "uniforms": rng.random((rows, length)).astype("f"),
        "noise": rng.integers(0, 96, (rows, length)),
    }


def run(file: Path, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def plain(file: Path, head: Head, out: Path) -> Path:
    """The lowered head with the dequantized table."""
    lower_graph(file, out)
    data = dequantize(head.packed).astype("f").tobytes()
    (out.parent / "embedding.bin").write_bytes(data)
    return out


def test_a_row_has_a_scale(head: Head) -> None:
    found = dequantize(head.packed)
    scale = np.abs(head.given).max(axis=1) / np.float32(127)
    np.testing.assert_allclose(head.packed.scale, scale, rtol=2**-8)
    assert (np.abs(found - head.given) <= 0.51 * head.packed.scale[:, None]).all()
    assert np.linalg.norm(found - head.given) < 0.01 * np.linalg.norm(head.given)


def test_the_codes_have_the_table_s_file(head: Head) -> None:
    entry = embedding_entry(head.file)
    data = (head.file.parent / "embedding.bin").read_bytes()
    assert entry["shape"] == list(head.given.shape)
    assert entry["dtype"] == "int8"
    assert entry["scale"]["dtype"] == "bfloat16"
    assert data.startswith(head.packed.values.tobytes())
    assert data[entry["scale"]["offset"] :] == lowbits.to_bf16(head.packed.scale).tobytes()


def test_the_host_reads_the_same_rows(head: Head, lowered: Path) -> None:
    tokens = np.array([[0, 95, 41], [3, 3, 40]])
    for file in (head.file, lowered):
        manifest = SimpleNamespace(embedding=embedding_entry(file))
        bundle = SimpleNamespace(manifest=manifest, path=file.parent, file=file.parent.joinpath)
        found = map_table(bundle)[tokens]  # type: ignore[arg-type]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, dequantize(head.packed)[tokens])


def test_the_head_computes_with_what_the_codes_stand_for(
    plain_graphs: Bundle, head: Head, lowered: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    right = plain(plain_graphs.file("head.onnx"), head, tmp_path / "plain" / "head.onnx")
    given = feeds(plain_graphs.manifest.model)
    expected, found = run(right, given), run(lowered, given)
    for name in ("canvas", "argmax", "accepted"):
        np.testing.assert_array_equal(found[name], expected[name])
    for name in ("entropy", "next_hidden"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)
    assert len(np.unique(expected["argmax"])) > 4


@pytest.mark.parametrize("pieces", [1, 5])
def test_in_pieces_it_computes_the_same(
    plain_graphs: Bundle, lowered: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    size = 96 * plain_graphs.manifest.model.hidden_size * 4
    monkeypatch.setattr(embedding_table, "TABLE_PIECE_BYTES", -(-size // pieces))
    edited = ir.load(lowered)
    before = (lowered.parent / "embedding.bin").read_bytes()
    assert split_table(edited)
    assert not split_table(ir.Model(ir.Graph([], [], nodes=[]), ir_version=11))
    split = lowered.with_name("split.onnx")
    ir.save(edited, split)
    model = ir.to_proto(edited)
    onnx.checker.check_model(split)
    wide = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(wide) == 2 * pieces + 1
    # Codes are mapped once for both products: except for lookups, every byte belongs to one initializer.
    codes = [each for each in model.graph.initializer if each.name.startswith(f"{TABLE_VALUES}.")]
    assert len(codes) == pieces
    assert sum(each.dims[0] for each in codes) == 96
    # The products have separate scales. Otherwise they would share the dequantized pieces, which then stay in memory.
    assert len({node.input[1] for node in wide}) == 2 * pieces + 1
    assert (lowered.parent / "embedding.bin").read_bytes() == before
    given = feeds(plain_graphs.manifest.model)
    expected, found = run(lowered, given), run(split, given)
    for name in ("canvas", "argmax", "accepted"):
        np.testing.assert_array_equal(found[name], expected[name])
    for name in ("entropy", "next_hidden"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)
