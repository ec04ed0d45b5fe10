"""In ONNX Runtime, the lowered form of a quantized graph computes the same numbers with the same roundings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.formats import FORMATS
from canvasrt.graphs.cpu_experts import split_experts
from canvasrt.graphs.embedding_table import embedding_entry
from canvasrt.graphs.lower import lower_graph
from canvasrt.graphs.names import DOMAIN, UNPACK
from canvasrt.graphs.nbits import use_nbits
from canvasrt.graphs.rounding import operator, rounding
from tests.helpers import library
from tests.helpers import rounding as oracle
from tests.helpers.graph_runs import head_feeds, random_feeds, run_graph, show
from tests.helpers.quantized import BODY, CACHE_SCALE, EXPERTS, INPUT_AMAX, dequantize

ORACLE = {
    operator(FORMATS["fp8"]): oracle.round_fp8,
    operator(FORMATS["nvfp4"]): oracle.round_nvfp4,
}


def feeds(graphs: Bundle) -> dict[str, np.ndarray]:
    return random_feeds(graphs.manifest.model, rows=2, length=7, past=5)


@pytest.mark.parametrize("kind", ORACLE)
@pytest.mark.parametrize("scale", [1.0, 0.013, 1e-4])
def test_onnx_runtime_rounds_to_the_last_bit(kind: str, scale: float) -> None:
    """test_quantizers.py compares the oracle with another implementation."""
    rng = np.random.default_rng(0)
    codes = np.arange(256, dtype=np.uint8)
    grid = oracle.from_e4m3(codes[codes & 127 != 127])
    ties = np.arange(-64, 64) / 8
    wide = rng.standard_normal(2**14) * 10 ** rng.uniform(-6, 4, 2**14)
    x = np.concatenate([grid, np.nextafter(grid, np.float32(9)), ties, wide, np.zeros(34)])
    x = (x.astype("f")[: len(x) // 64 * 64] * np.float32(scale)).reshape(2, -1, 32)
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", x.shape), ("scale", []))
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", "scale"], ["y"], domain=DOMAIN)],
        "round",
        infos,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=11))
    for function in rounding(model.graph):
        model.functions[function.identifier()] = function
    found = run_graph(ir.to_proto(model), {"x": x, "scale": np.array(scale, "f")})
    np.testing.assert_array_equal(found["y"], ORACLE[kind](x, scale))


class Lowered:
    """A lowered body graph that also outputs the inputs and results of its roundings and matrix products."""

    def __init__(self, file: Path) -> None:
        model = onnx.load(file, load_external_data=False)
        nodes = model.graph.node
        self.producer = {value: node for node in nodes for value in node.output}
        self.rounds = [node for node in nodes if node.domain == DOMAIN]
        self.products = {
            self.producer[node.input[1]].input[0]: node
            for node in nodes
            if node.op_type == "MatMul" and self.kind_of(node.input[1]) == "Transpose"
        }
        self.file = file.with_name(f"shown_{file.name}")
        show(model, self.file, [*self.rounds, *self.products.values()])

    def kind_of(self, value: str) -> str | None:
        return self.producer[value].op_type if value in self.producer else None


@pytest.mark.parametrize(
    ("format", "what", "weights"),
    [
        ("fp8", BODY, "per_tensor"),
        ("fp8", BODY, "per_channel"),
        ("nvfp4", BODY, "per_tensor"),
        ("nvfp4", EXPERTS, "per_tensor"),
    ],
)
def test_every_product_is_the_quantized_graph_s(
    plain_graphs: Bundle, quantized: Callable, tmp_path: Path, format, what, weights
) -> None:
    made = quantized(format, what, weights)
    lower_graph(made.file, tmp_path / "body_0.onnx")
    body = Lowered(tmp_path / "body_0.onnx")
    found = run_graph(body.file, feeds(plain_graphs))
    assert len(body.rounds) == len(made.packed)
    scale = np.float32(INPUT_AMAX / (448 if format == "fp8" else 6 * 448))
    for node in body.rounds:
        expected = ORACLE[node.op_type](found[node.input[0]], float(scale))
        np.testing.assert_array_equal(found[node.output[0]], expected)
        assert (expected != found[node.input[0]]).any()
    for name, packed in made.packed.items():
        product = body.products[name]
        x = product.input[0]
        before = body.producer[x].input[0] if body.kind_of(x) == "Gather" else x
        assert body.producer[before].domain == DOMAIN, name
        expected = found[x] @ dequantize(packed).swapaxes(-1, -2)
        np.testing.assert_allclose(found[product.output[0]], expected, rtol=1e-4, atol=1e-5)


def test_int4_weights_stay_packed(
    plain_graphs: Bundle, quantized: Callable, tmp_path: Path
) -> None:
    made = quantized("int4")
    lower_graph(made.file, tmp_path / "body_0.onnx")
    body = Lowered(tmp_path / "body_0.onnx")
    assert {node.op_type for node in body.rounds} == {UNPACK}
    found = run_graph(body.file, feeds(plain_graphs))
    for name, packed in made.packed.items():
        product = body.products[f"{name}/unpacked"]
        expected = found[product.input[0]] @ dequantize(packed).swapaxes(-1, -2)
        np.testing.assert_allclose(found[product.output[0]], expected, rtol=1e-4, atol=1e-5)
    stored = ir.load(tmp_path / "body_0.onnx").graph.initializers
    for name, packed in made.packed.items():
        codes = np.frombuffer(stored[f"{name}.codes"].const_value.tobytes(), np.uint8)
        np.testing.assert_array_equal(codes ^ 0x88, packed.values.reshape(-1))
        assert stored[f"{name}.scales"].const_value.tobytes() == packed.block_scales.tobytes()


def test_onnx_runtime_multiplies_the_same_codes(
    plain_graphs: Bundle, quantized: Callable, tmp_path: Path
) -> None:
    """MatMulNBits multiplies its inputs by exactly the packed weights."""
    made = quantized("int4")
    lower_graph(made.file, tmp_path / "body_0.onnx")
    edited = ir.load(tmp_path / "body_0.onnx")
    bytes_before = (tmp_path / "body_0.bin").read_bytes()
    assert split_experts(edited)
    assert use_nbits(edited)
    model = ir.to_proto(edited)
    assert not any(node.op_type == UNPACK for node in model.graph.node)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    # Each of two layers has four matrices, and two matrices for each of four experts.
    assert len(products) == 2 * (4 + 2 * 4)
    show(model, tmp_path / "fast.onnx", products)
    assert (tmp_path / "body_0.bin").read_bytes() == bytes_before
    found = run_graph(tmp_path / "fast.onnx", feeds(plain_graphs))
    for node in products:
        name, _, expert = node.input[1].partition(".codes")
        packed = dequantize(made.packed[name])
        weight = packed[int(expert[1:])] if expert else packed
        x = found[node.input[0]]
        level = next(a.i for a in node.attribute if a.name == "accuracy_level")
        if expert:
            block = made.packed[name].form.block
            x, expected_level = round_int8(x, block), 4
        else:
            expected_level = 0
        assert level == expected_level
        np.testing.assert_allclose(found[node.output[0]], x @ weight.T, rtol=1e-3, atol=1e-3)


def round_int8(x: np.ndarray, block: int) -> np.ndarray:
    """Round inputs as MatMulNBits does at accuracy level 4: to int8, with each block's largest magnitude as scale."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127), 1e-30)
    return (np.rint(blocks / scale) * scale).reshape(x.shape)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_the_experts_can_be_split(
    plain_graphs: Bundle, quantized: Callable, tmp_path: Path, format: str
) -> None:
    lower_graph(quantized(format).file, tmp_path / "body_0.onnx")
    expected = run_graph(tmp_path / "body_0.onnx", feeds(plain_graphs), "hidden_out")
    model = ir.load(tmp_path / "body_0.onnx")
    rounds = sum(node.domain == DOMAIN for node in model.graph)
    assert split_experts(model)
    assert sum(node.domain == DOMAIN for node in model.graph) == rounds
    ir.save(model, tmp_path / "split.onnx")
    found = run_graph(tmp_path / "split.onnx", feeds(plain_graphs), "hidden_out")
    np.testing.assert_allclose(*found.values(), *expected.values(), rtol=1e-4, atol=1e-4)


def test_a_cache_in_fp8_is_rounded_when_it_is_written(
    plain_graphs: Bundle, quantized: Callable, tmp_path: Path
) -> None:
    lower_graph(quantized("fp8", cache=True).file, tmp_path / "rounded.onnx")
    lower_graph(quantized("fp8").file, tmp_path / "plain.onnx")
    given = feeds(plain_graphs)
    rounded, plain = (run_graph(tmp_path / f"{n}.onnx", given) for n in ("rounded", "plain"))
    for name in ("new_key_0", "new_value_0", "new_key_1", "new_value_1"):
        expected = oracle.round_fp8(plain[name], CACHE_SCALE)
        assert rounded[name].dtype == np.float32
        assert (expected != plain[name]).any()
        if name.endswith("_0"):  # the first layer has the same inputs in both graphs
            np.testing.assert_array_equal(rounded[name], expected)
        np.testing.assert_array_equal(oracle.round_fp8(rounded[name], CACHE_SCALE), rounded[name])


def test_a_bf16_bundle_is_widened(tmp_path: Path) -> None:
    """The result equals an fp32 export of the same checkpoint, which has bf16 weights."""
    narrow, right = (
        load_bundle(library.graphs("demo", precision), check=False)
        for precision in ("bf16", "fp32")
    )
    wide = tmp_path / "wide"
    wide.mkdir()
    for entry in narrow.manifest.segments:
        lower_graph(narrow.file(entry["file"]), wide / entry["file"])
    expected = {**narrow.manifest.embedding, "dtype": "float32"}
    assert embedding_entry(wide / "head.onnx").items() <= expected.items()
    assert {path.name for path in wide.iterdir()} == {
        name for name in narrow.manifest.files if not name.startswith(("tokenizer", "host_head"))
    }
    assert (wide / "embedding.bin").read_bytes() == right.file("embedding.bin").read_bytes()
    for file, given in (
        ("body_0.onnx", feeds(narrow)),
        ("head.onnx", head_feeds(narrow.manifest.model, 1, 16)),
    ):
        found, expected = (run_graph(folder / file, given) for folder in (wide, right.path))
        for name, each in expected.items():
            np.testing.assert_allclose(found[name], each, rtol=1e-3, atol=2e-3, err_msg=name)
    model = ir.load(wide / "body_0.onnx")
    values = [*model.graph.initializers.values(), *model.graph.inputs, *model.graph.outputs]
    assert all(value.dtype != ir.DataType.BFLOAT16 for value in values)


def test_no_torch_is_needed(quantized: Callable, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from canvasrt.graphs.lower import lower_graph;"
        "lower_graph(Path(sys.argv[1]), Path(sys.argv[2])); assert 'torch' not in sys.modules"
    )
    files = [quantized("nvfp4").file, tmp_path / "body_0.onnx"]
    subprocess.run([sys.executable, "-P", "-c", code, *map(str, files)], check=True)
