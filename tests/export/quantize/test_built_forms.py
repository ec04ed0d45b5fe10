"""TensorRT-RTX engines built from quantized graphs keep and multiply the packed numbers."""

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
from canvasrt.export.quantize.packed import Packed
from canvasrt.export.quantize.quantizers import form_of, quantize_weight
from canvasrt.roofline import cost
from canvasrt.roofline.parse import is_kernel_list, parse
from tests.helpers.quantized import producers, quantize_file

SIZES = {
    "batch": (1, 1, 2),
    "length": (1, 16, 32),
    "capacity": (1, 16, 32),
    "gate_rows": (1, 16, 32),
    "gate_queues": (4, 4, 4),
    "octets_full": (1, 2, 4),
    "octets_sliding": (1, 2, 4),
}


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
        """Return the number of kernels that multiply constants of this dtype by an input."""
        return sum(f"Datatype: {kind}" in line and "Fc" in line for line in self.listed)


@pytest.mark.parametrize(
    ("format", "weights", "capability"),
    [
        ("fp8", "per_channel", "SM89"),
        ("fp8", "per_tensor", "SM120"),
        ("nvfp4", "per_tensor", "SM121"),
    ],
)
def test_tensorrt_builds_a_body_whose_weights_stay_packed(
    quantized, format: str, weights: str, capability: str
) -> None:
    """The cache may be in FP8, too."""
    made = quantized(format, weights=weights, cache=weights == "per_tensor")
    values = (*(model := ir.load(made.file)).graph.inputs, *model.graph.outputs)
    cached = [value.dtype for value in values if "_key_" in value.name or "_value_" in value.name]
    kind = ir.DataType.FLOAT8E4M3FN if weights == "per_tensor" else ir.DataType.BFLOAT16
    assert cached == [kind] * 8
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
    quantize_file(
        source,
        tmp_path / "head.onnx",
        {"table": form},
        lambda _: quantize_weight([table], "int8", None),
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
    quantize_file(
        source,
        tmp_path / "head.onnx",
        {"table": form_of(shape, "fp8")},
        lambda _: quantize_weight([table], "fp8", 6.0),
    )
    engine = Engine(tmp_path / "head.onnx", capability)
    products = [cost.product_format(each) for each in engine.kernels if cost.is_product(each)]
    assert sorted(products) == ["bf16", "bf16", "fp8", "fp8"]
    stored = sum(
        file.stat().st_size for file in (tmp_path / "head.bin", tmp_path / "embedding.bin")
    )
    assert engine.weights <= 1.2 * stored


@pytest.mark.parametrize("capability", ["SM80", "SM120"])
def test_tensorrt_reads_int4_in_every_product(quantized, capability: str) -> None:
    made = quantized("int4")
    engine = Engine(made.file, capability)
    assert engine.reading("Int4") == len(made.packed) == 12
    assert engine.weights <= 1.1 * made.file.with_suffix(".bin").stat().st_size


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
        return quantize_weight(
            rng.standard_normal((experts, out, size)).astype("f"), format, 4.0, experts=True
        )

    form = form_of((experts, out, size), format, experts=True)
    quantize_file(plain, file, {"w": form}, pack)
    if spoil is not None:
        model = ir.load(file)
        found = producers(model, "w")
        if spoil == "input not quantized":
            found["product"].replace_input_with(0, model.graph.inputs[0])
        else:  # the factor is applied before the product
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
    """The kernel list shows a product of packed numbers, and no kernel that widens the weight, for which TensorRT reports
    memory."""
    wide = experts_graph(tmp_path / "experts.onnx", format, spoil)
    engine = Engine(tmp_path / "experts.onnx", capability)
    kernels = engine.kernels
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
    if format == "nvfp4":
        assert engine.weights < 0.3 * wide
        assert (engine.activations > wide) == (spoil is not None), "or the measure says nothing"
