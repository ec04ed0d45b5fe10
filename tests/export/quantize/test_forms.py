"""The quantized forms in the graph, and TensorRT-RTX engines built from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from canvasrt.bundle import Bundle
from canvasrt.errors import CanvasError
from canvasrt.export.quantize import forms
from canvasrt.export.quantize.packed import Form, Packed
from canvasrt.export.quantize.quantizers import form_of, quantize
from canvasrt.graphs import lowbits
from canvasrt.kernels import cost
from canvasrt.kernels.parse import is_kernel_list, parse
from tests.helpers.quantized import EXPERTS

GATE_UP = "layers.1.experts.gate_up"
SIZES = {
    "batch": (1, 1, 2),
    "length": (1, 16, 32),
    "capacity": (1, 16, 32),
    "gate_rows": (1, 16, 32),
    "gate_queues": (4, 4, 4),
    "octets_full": (1, 2, 4),
    "octets_sliding": (1, 2, 4),
}


def producers(model: ir.Model, name: str) -> dict[str, ir.Node]:
    """Return the nodes of a quantized weight's form, by the suffix of their names."""
    return {
        str(node.name).removeprefix(f"{name}/"): node
        for node in model.graph
        if str(node.name).startswith(f"{name}/")
    }


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
        ("weight", "DequantizeLinear"),
        ("turned", "Transpose"),
        ("product", "MatMul"),
    ]
    assert form["input"].attributes["output_dtype"].value == TensorProto.BFLOAT16
    assert form["weight"].attributes["axis"].value == 0
    scale = model.graph.initializers["layers.0.mlp.down.weight.scale"]
    assert (scale.dtype, tuple(scale.shape)) == (ir.DataType.FLOAT, (64,))
    # A per-expert scale inside the DequantizeLinear would be dequantized on every call.
    assert model.graph.initializers[f"{GATE_UP}.scale"].shape == ()
    assert tuple(model.graph.initializers[f"{GATE_UP}.factor"].shape) == (4, 1, 64)


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
        assert before[name].const_value.tobytes() == after[name].const_value.tobytes(), name
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


class Engine:
    """What TensorRT-RTX reports about an engine it built; without a GPU, nothing else can be known."""

    def __init__(self, graph: Path, capability: str) -> None:
        trt = pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
        lines: list[str] = []

        class Log(trt.ILogger):
            def log(self, severity: Any, message: str) -> None:
                lines.append(message)

        builder = trt.Builder(Log())
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(flag)
        parser = trt.OnnxParser(network, builder.logger)
        assert parser.parse_from_file(str(graph)), parser.get_error(0).desc()
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            value = network.get_input(index)
            sizes = [
                [
                    size if size >= 0 else SIZES[value.get_dimension_name(axis)][which]
                    for axis, size in enumerate(value.shape)
                ]
                for which in range(3)
            ]
            profile.set_shape(value.name, *sizes)
        config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
        assert engine is not None, lines[-5:]
        said = dict(re.findall(r"Total (\w+) Memory: (\d+) bytes", "\n".join(lines)))
        self.weights, self.activations = int(said["Weights"]), int(said["Activation"])
        (listed,) = (line for line in lines if is_kernel_list(line))
        (self.kernels,) = parse(listed)
        self.listed = [line for line in listed.splitlines() if line.startswith("Name: ")]

    def reading(self, kind: str) -> int:
        """Return how many kernels multiply constants of this dtype by an input."""
        return sum(f"Datatype: {kind}" in line and "Fc" in line for line in self.listed)


@pytest.mark.parametrize(
    ("format", "weights", "capability"),
    [
        ("fp8", "per_tensor", "SM89"),
        ("fp8", "per_channel", "SM89"),
        ("fp8", "per_tensor", "SM120"),
        ("fp8", "per_tensor", "SM121"),
        ("nvfp4", "per_tensor", "SM120"),
        ("nvfp4", "per_tensor", "SM121"),
    ],
)
def test_tensorrt_builds_a_body_whose_weights_stay_packed(
    quantized, format: str, weights: str, capability: str
) -> None:
    made = quantized(format, weights=weights)
    engine = Engine(made.file, capability)
    # Block scales are padded.
    assert engine.weights <= 1.1 * made.file.with_suffix(".bin").stat().st_size


@pytest.mark.parametrize("capability", ["SM86", "SM120"])
def test_tensorrt_reads_an_int8_table_in_both_products_and_in_the_lookup(
    plain_graphs: Bundle, tmp_path: Path, capability: str
) -> None:
    source = plain_graphs.file("head.onnx")
    shape = (96, 64)
    table = np.random.default_rng(0).standard_normal(shape).astype("f")
    form = form_of(shape, "int8")
    forms.quantize_file(
        source, tmp_path / "head.onnx", {"table": form}, lambda _: quantize([table], "int8", None)
    )
    listed = Engine(tmp_path / "head.onnx", capability).listed
    reading = [line for line in listed if "Datatype: Int8" in line.split("Outputs:")[0]]
    kinds = [line.partition(",")[0] for line in reading]
    assert sorted(("Fc" in kind, "Gath" in kind) for kind in kinds) == [
        (False, True),
        (True, False),
        (True, False),
    ]
    whole = [f"Dimensions: [{','.join(map(str, each))}]" for each in (shape, shape[::-1])]
    assert not any(each in line.split("Outputs:")[1] for line in listed for each in whole)


@pytest.mark.parametrize("capability", ["SM89", "SM120", "SM121"])
def test_tensorrt_multiplies_in_fp8_by_one_copy_of_the_table(
    plain_graphs: Bundle, tmp_path: Path, capability: str
) -> None:
    source, shape = plain_graphs.file("head.onnx"), (96, 64)
    table = np.random.default_rng(0).standard_normal(shape).astype("f")
    (tmp_path / "embedding.bin").hardlink_to(source.with_name("embedding.bin"))
    forms.quantize_file(
        source,
        tmp_path / "head.onnx",
        {"table": form_of(shape, "fp8")},
        lambda _: quantize([table], "fp8", 6.0),
    )
    engine = Engine(tmp_path / "head.onnx", capability)
    products = [cost.product_format(each) for each in engine.kernels if cost.is_product(each)]
    assert sorted(products) == ["bf16", "bf16", "fp8", "fp8"]
    stored = sum(
        file.stat().st_size for file in (tmp_path / "head.bin", tmp_path / "embedding.bin")
    )
    assert engine.weights <= 1.2 * stored


@pytest.mark.parametrize("capability", ["SM80", "SM86", "SM89", "SM120"])
def test_tensorrt_reads_int4_in_every_product(quantized, capability: str) -> None:
    made = quantized("int4")
    engine = Engine(made.file, capability)
    assert engine.reading("Int4") == len(made.packed) == 12
    assert engine.weights <= 1.1 * made.file.with_suffix(".bin").stat().st_size


@pytest.mark.parametrize(("format", "capability"), [("fp8", "SM89"), ("nvfp4", "SM120")])
def test_tensorrt_takes_a_cache_in_fp8(quantized, format: str, capability: str) -> None:
    made = quantized(format, cache=True)
    model = ir.load(made.file)
    cached = [
        v
        for v in (*model.graph.inputs, *model.graph.outputs)
        if "_key_" in v.name or "_value_" in v.name
    ]
    assert len(cached) == 8
    assert {value.dtype for value in cached} == {ir.DataType.FLOAT8E4M3FN}
    Engine(made.file, capability)


def experts_graph(file: Path, format: str, spoil: str | None = None) -> int:
    """Return 64 experts over `[64, length, 256]` in bf16, quantized and perhaps spoilt, and their
    weight's bytes in bf16."""
    experts, out, size = 64, 512, 256
    weight = helper.make_tensor(
        "w", TensorProto.BFLOAT16, [experts, out, size], b"\0" * experts * out * size * 2, raw=True
    )
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["p"]),
        helper.make_node("Neg", ["p"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "experts",
        [info("x", TensorProto.BFLOAT16, [experts, "length", size])],
        [info("y", TensorProto.BFLOAT16, [experts, "length", out])],
        [weight],
    )
    plain = file.with_name("plain.onnx")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), plain)

    def pack(name: str) -> Packed:
        rng = np.random.default_rng(0)
        return quantize(
            rng.standard_normal((experts, out, size)).astype("f"), format, 4.0, experts=True
        )

    form = form_of((experts, out, size), format, experts=True)
    forms.quantize_file(plain, file, {"w": form}, pack)
    if spoil is not None:
        model = ir.load(file)
        found = producers(model, "w")
        if spoil == "input not quantized":
            found["product"].replace_input_with(0, model.graph.inputs[0])
        else:  # the factor before the product
            found["turned"].outputs[0].replace_all_uses_with(found["scaled"].outputs[0])
            found["scaled"].outputs[0].replace_all_uses_with(found["product"].outputs[0])
            found["scaled"].replace_input_with(0, found["turned"].outputs[0])
            found["product"].replace_input_with(1, found["scaled"].outputs[0])
            model.graph.sort()
        ir.save(model, file)
    return experts * out * size * 2


SPOILT = [None, "input not quantized", "factor before the product"]


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize(("format", "capability"), [("fp8", "SM89"), ("nvfp4", "SM120")])
def test_experts_are_multiplied_in_their_format(
    tmp_path: Path, format: str, capability: str, spoil: str | None
) -> None:
    """The kernel list shows a product of packed numbers, and no kernel that widens the weight."""
    experts_graph(tmp_path / "experts.onnx", format, spoil)
    kernels = Engine(tmp_path / "experts.onnx", capability).kernels
    found = {cost.product_format(kernel) for kernel in kernels if cost.is_product(kernel)}
    written = [
        kernel.name
        for kernel in kernels
        if any(sorted(each.dims)[-3:] == [64, 256, 512] for each in kernel.outputs)
    ]
    if spoil is None:
        assert found == {"fp4" if format == "nvfp4" else format}
        assert not written
    else:
        assert found == {"bf16"}, "or the kernels say nothing"
        assert written or format == "fp8"


@pytest.mark.parametrize("spoil", SPOILT)
def test_experts_are_multiplied_in_nvfp4(tmp_path: Path, spoil: str | None) -> None:
    """An engine that dequantizes the weight on every call needs memory for it, which TensorRT reports."""
    wide = experts_graph(tmp_path / "experts.onnx", "nvfp4", spoil)
    engine = Engine(tmp_path / "experts.onnx", "SM120")
    small = experts_graph(tmp_path / "other.onnx", "fp8")
    usual = Engine(tmp_path / "other.onnx", "SM89").activations
    assert engine.weights < 0.3 * wide
    if spoil is None:
        assert engine.activations < usual + wide // 8
    else:
        assert engine.activations > usual + wide // 2, "or the measure says nothing"
    assert small == wide
