"""How quantized weights are represented in the graph."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from canvasrt.errors import CanvasError
from canvasrt.graphs.packed import Form
from canvasrt.graphs.quantized import quantize_graph
from tests.helpers.quantized import producers

GATE_UP = "layers.1.experts.gate_up"


FP8_PER_OUTPUT = (
    "input_bits: QuantizeLinear, input: DequantizeLinear, one: Constant, weight: DequantizeLinear,"
    " turned: Transpose, product: MatMul, wide: Cast, scaled: Mul, narrow: Cast"
)
NVFP4_EXPERTS = (
    "input_bits: TRT_FP4DynamicQuantize, input_scales: DequantizeLinear, input_wide: DequantizeLinear, input: Cast,"
    " weight_scales: DequantizeLinear, weight_wide: DequantizeLinear, weight: Cast, turned: Transpose, product: MatMul,"
    " scaled: Mul"
)


@pytest.mark.parametrize(
    ("format", "name", "nodes", "shapes"),
    [
        # TensorRT writes a product in 16 bits only if its weight has a single scale. So scales per output multiply the
        # product instead.
        ("fp8", "layers.0.mlp.down.weight", FP8_PER_OUTPUT, {"scale": (64,)}),
        ("fp8", GATE_UP, None, {"scale": (), "factor": (4, 1, 64)}),
        (
            "nvfp4",
            GATE_UP,
            NVFP4_EXPERTS,
            {"block_scales": (4, 64, 4), "scale": (), "factor": (4, 1, 1)},
        ),
        (
            "int4",
            GATE_UP,
            "weight: DequantizeLinear, turned: Transpose, product: MatMul",
            {"block_scales": (4, 64, 2)},
        ),
    ],
)
def test_a_product_stands_in_the_graph_as_tensorrt_fuses_it(
    quantized, format: str, name: str, nodes: str | None, shapes: dict[str, tuple[int, ...]]
) -> None:
    model = ir.load(quantized(format, weights="per_channel").file)
    found = [f"{part}: {node.op_type}" for part, node in producers(model, name).items()]
    assert nodes is None or ", ".join(found) == nodes
    stored = model.graph.initializers
    parts = {each for each in stored if each.startswith(f"{name}.")}
    rounded = set() if format == "int4" else {f"{name}.input_scale"}
    assert parts == {f"{name}.{suffix}" for suffix in shapes} | {f"{name}.values"} | rounded
    assert {suffix: tuple(stored[f"{name}.{suffix}"].shape) for suffix in shapes} == shapes
    assert name not in stored


def test_heads_are_split_before_they_are_scaled(quantized) -> None:
    """A reshape between the scales and the norm would need a separate kernel."""
    model = ir.load(quantized("fp8", weights="per_channel").file)
    name = "layers.0.attention.qkv.weight"
    form = producers(model, name)
    scaled, heads = form["scaled"], form["heads"]
    assert heads.inputs[0] is form["product"].outputs[0]
    assert scaled.inputs[0].producer().inputs[0] is heads.outputs[0]
    size = model.graph.initializers["layers.0.attention.q_norm.weight"].shape[0]
    by_head = ir.convenience.get_const_tensor(form["scales"].inputs[1])
    assert by_head.numpy().tolist() == [-1, size]
    assert ir.convenience.get_const_tensor(form["weight"].inputs[1]).numpy() == 1
    after = form["narrow"].outputs[0].consumers()
    assert {node.op_type for node in after} == {"RMSNormalization"}


def product_of(weights: list[tuple[str, int]], used: str = "x", op: str = "MatMul") -> ir.Model:
    """Return a graph that multiplies one input `[n, 32]` by several weights `[out, 32]`."""
    nodes, inits = [], []
    for name, out in weights:
        inits.append(onnx.numpy_helper.from_array(np.ones((out, 32), np.float32), name))
        if op == "Gemm":
            nodes.append(helper.make_node("Gemm", [used, name], [f"{name}_y"], transB=1))
        else:
            nodes.append(helper.make_node("Transpose", [name], [f"{name}_t"], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", [used, f"{name}_t"], [f"{name}_y"]))
    float_info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "products",
        [float_info("x", TensorProto.FLOAT, ["n", 32])],
        [float_info(f"{name}_y", TensorProto.FLOAT, ["n", out]) for name, out in weights],
        inits,
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_an_input_of_several_weights_is_quantized_once(op: str) -> None:
    model = product_of([("a", 16), ("b", 48), ("c", 16)], op=op)
    quantize_graph(
        model,
        {"a": Form("fp8", (16, 32)), "b": Form("fp8", (48, 32)), "c": Form("nvfp4", (16, 32))},
    )
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("QuantizeLinear") == 1
    assert kinds.count("TRT_FP4DynamicQuantize") == 1
    assert {n for n in model.graph.initializers if n.endswith("input_scale")} == {
        "a.input_scale",
        "c.input_scale",
    }
    assert [value.name for value in model.graph.outputs] == ["a_y", "b_y", "c_y"]


def test_what_has_no_such_form_is_refused() -> None:
    model = product_of([("a", 16)])
    with pytest.raises(CanvasError, match="the graph has no weight b"):
        quantize_graph(model, {"b": Form("fp8", (16, 32))})
    with pytest.raises(CanvasError, match=r"a has shape \[16,32\] in the graph, but \(32, 16\)"):
        quantize_graph(model, {"a": Form("fp8", (32, 16))})
    model.graph.outputs.append(next(iter(model.graph)).outputs[0])
    model.graph.append(ir.node("Neg", [model.graph.initializers["a"]]))
    with pytest.raises(CanvasError, match="a is not the weight of one matrix product"):
        quantize_graph(model, {"a": Form("fp8", (16, 32))})
