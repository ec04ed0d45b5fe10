"""The quantized forms in the graph."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from canvasrt.bundle import Bundle
from canvasrt.errors import CanvasError
from canvasrt.export.quantize import forms
from canvasrt.export.quantize.packed import Form
from canvasrt.graphs import external, lowbits
from tests.helpers.quantized import EXPERTS, producers

GATE_UP = "layers.1.experts.gate_up"


def test_nvfp4_stands_in_the_graph_as_tensorrt_keeps_it(quantized) -> None:
    model = ir.load(quantized("nvfp4").file)
    form = producers(model, GATE_UP)
    assert {name: node.op_type for name, node in form.items()} == {
        "input_bits": "TRT_FP4DynamicQuantize",
        "input_scales": "DequantizeLinear",
        "input_wide": "DequantizeLinear",
        "input": "Cast",
        "weight_scales": "DequantizeLinear",
        "weight_wide": "DequantizeLinear",
        "weight": "Cast",
        "turned": "Transpose",
        "product": "MatMul",
        "scaled": "Mul",
    }
    assert form["scaled"].inputs[0] is form["product"].outputs[0]
    assert form["product"].inputs[1] is form["turned"].outputs[0]
    attributes = {name: a.value for name, a in form["input_bits"].attributes.items()}
    assert attributes == {"axis": -1, "block_size": 16, "scale_type": TensorProto.FLOAT8E4M3FN}
    stored = {
        suffix: (value.dtype.name, tuple(value.shape))
        for suffix in ("values", "block_scales", "scale", "input_scale", "factor")
        for value in [model.graph.initializers[f"{GATE_UP}.{suffix}"]]
    }
    assert stored == {
        "values": ("FLOAT4E2M1", (4, 64, 64)),
        "block_scales": ("FLOAT8E4M3FN", (4, 64, 4)),
        "scale": ("FLOAT", ()),
        "input_scale": ("FLOAT", ()),
        "factor": ("BFLOAT16", (4, 1, 1)),
    }
    assert GATE_UP not in model.graph.initializers


def test_fp8_stands_in_the_graph_as_tensorrt_keeps_it(quantized) -> None:
    model = ir.load(quantized("fp8", weights="per_channel").file)
    form = producers(model, "layers.0.mlp.down.weight")
    assert [(name, node.op_type) for name, node in form.items()] == [
        ("input_bits", "QuantizeLinear"),
        ("input", "DequantizeLinear"),
        ("one", "Constant"),
        ("weight", "DequantizeLinear"),
        ("turned", "Transpose"),
        ("product", "MatMul"),
        ("wide", "Cast"),
        ("scaled", "Mul"),
        ("narrow", "Cast"),
    ]
    assert form["input"].attributes["output_dtype"].value == TensorProto.BFLOAT16
    # TensorRT writes a product in 16 bits only if its weight has one scale.
    assert ir.convenience.get_const_tensor(form["weight"].inputs[1]).numpy() == 1
    scale = model.graph.initializers["layers.0.mlp.down.weight.scale"]
    assert form["scaled"].inputs[1] is scale
    assert (scale.dtype, tuple(scale.shape)) == (ir.DataType.FLOAT, (64,))
    # A per-expert scale inside the DequantizeLinear would be dequantized on every call.
    assert model.graph.initializers[f"{GATE_UP}.scale"].shape == ()
    assert tuple(model.graph.initializers[f"{GATE_UP}.factor"].shape) == (4, 1, 64)


def test_heads_are_split_before_they_are_scaled(quantized) -> None:
    """A reshape between the scales and the norm would cost a kernel."""
    model = ir.load(quantized("fp8", weights="per_channel").file)
    name = "layers.0.attention.qkv.weight"
    form = producers(model, name)
    scaled, heads = form["scaled"], form["heads"]
    assert heads.inputs[0] is form["product"].outputs[0]
    assert scaled.inputs[0].producer().inputs[0] is heads.outputs[0]
    size = model.graph.initializers["layers.0.attention.q_norm.weight"].shape[0]
    by_head = ir.convenience.get_const_tensor(form["scales"].inputs[1])
    assert by_head.numpy().tolist() == [-1, size]
    after = form["narrow"].outputs[0].consumers()
    assert {node.op_type for node in after} == {"RMSNormalization"}


def test_int4_stands_in_the_graph_as_tensorrt_keeps_it(quantized) -> None:
    made = quantized("int4")
    model = ir.load(made.file)
    for name, block in ((GATE_UP, 32), ("layers.1.experts.down", 16)):
        form = producers(model, name)
        assert [(part, node.op_type) for part, node in form.items()] == [
            ("weight", "DequantizeLinear"),
            ("turned", "Transpose"),
            ("product", "MatMul"),
        ]
        attributes = {key: each.value for key, each in form["weight"].attributes.items()}
        assert attributes == {"axis": -1, "block_size": block}
        shape = made.shapes[name]
        values, scales = (
            model.graph.initializers[f"{name}.{part}"] for part in ("values", "block_scales")
        )
        assert (values.dtype, tuple(values.shape)) == (ir.DataType.INT4, shape)
        blocks = (*shape[:-1], shape[-1] // block)
        assert (scales.dtype, tuple(scales.shape)) == (ir.DataType.BFLOAT16, blocks)
        packed = made.packed[name]
        assert made.bytes_of(f"{name}.values") == packed.values.tobytes()
        stored = np.frombuffer(made.bytes_of(f"{name}.block_scales"), np.uint16)
        found = lowbits.from_bf16(stored).reshape(blocks)
        np.testing.assert_array_equal(found, packed.block_scales)
        others = {f"{name}.{part}" for part in ("scale", "input_scale", "factor")}
        assert not others & model.graph.initializers.keys()


def test_the_bytes_in_the_graph_are_those_that_were_packed(quantized) -> None:
    made = quantized("nvfp4")
    assert made.packed.keys() == made.forms.keys()
    for name, packed in made.packed.items():
        assert made.bytes_of(f"{name}.values") == packed.values.tobytes()
        assert made.bytes_of(f"{name}.block_scales") == packed.block_scales.tobytes()
        assert made.bytes_of(f"{name}.scale") == packed.scale.tobytes()
        assert made.bytes_of(f"{name}.input_scale") == packed.input_scale.tobytes()
    factor = made.packed[GATE_UP].factor
    assert made.bytes_of(f"{GATE_UP}.factor") == lowbits.to_bf16(factor).tobytes()


def test_what_is_not_quantized_keeps_its_bytes(plain_graphs: Bundle, quantized) -> None:
    before = ir.load(plain_graphs.file("body_0.onnx")).graph.initializers
    after = ir.load(quantized("nvfp4", EXPERTS).file).graph.initializers
    kept = set(before) & set(after)
    assert set(before) - kept == {
        f"layers.{i}.experts.{w}" for i in (0, 1) for w in ("gate_up", "down")
    }
    for name in kept:
        # Other bundles may link the file, which `tobytes` refuses to read.
        old = b"".join(external.pieces(before[name].const_value))
        assert old == after[name].const_value.tobytes(), name
    large = [v.const_value for v in after.values() if v.const_value.nbytes >= 1 << 16]
    assert large
    assert all(tensor.offset % 4096 == 0 for tensor in large)


def product_of(weights: list[tuple[str, int]], used: str = "x", op: str = "MatMul") -> ir.Model:
    """Return a graph that multiplies one input `[n, 32]` with several weights `[out, 32]`."""
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
    forms.quantize_graph(
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
        forms.quantize_graph(model, {"b": Form("fp8", (16, 32))})
    with pytest.raises(CanvasError, match=r"a has shape \[16,32\] in the graph, but \(32, 16\)"):
        forms.quantize_graph(model, {"a": Form("fp8", (32, 16))})
    model.graph.outputs.append(next(iter(model.graph)).outputs[0])
    model.graph.append(ir.node("Neg", [model.graph.initializers["a"]]))
    with pytest.raises(CanvasError, match="a is not the weight of one matrix product"):
        forms.quantize_graph(model, {"a": Form("fp8", (16, 32))})
