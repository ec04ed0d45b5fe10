"""TensorRT-RTX engines built from quantized graphs store packed weights and multiply them in their format.

`tests/canvasrt/roofline/test_released.py` checks this for the released widths and all recipes.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from canvasrt.bundle import Bundle
from canvasrt.export.quantize.quantizers import form_of, quantize_weight
from canvasrt.roofline import cost
from canvasrt.roofline.parse import is_kernel_list, parse
from tests.helpers.quantized import quantize_file

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
    """An engine as TensorRT-RTX reports it after building. Without a GPU, nothing else is known about it."""

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
        self.weights = int(said["Weights"])
        (listed,) = (line for line in lines if is_kernel_list(line))
        (self.kernels,) = parse(listed)

    def products(self) -> Counter[tuple[str, str]]:
        """Count the products with a constant by the constant's dtype and the product's format."""
        weights = [(each, cost.weight(each)) for each in self.kernels if cost.is_product(each)]
        return Counter(
            (held.dtype, cost.product_format(each)) for each, held in weights if held is not None
        )


@pytest.mark.parametrize(
    ("format", "weights", "capability", "product"),
    [
        ("fp8", "per_channel", "SM89", ("FP8", "fp8")),
        ("fp8", "per_tensor", "SM120", ("FP8", "fp8")),
        ("nvfp4", "per_tensor", "SM121", ("FP4E2M1", "fp4")),
        ("int4", "per_channel", "SM80", ("Int4", "bf16")),
        ("int4", "per_tensor", "SM120", ("Int4", "bf16")),
    ],
)
def test_tensorrt_multiplies_packed_weights(
    quantized, format: str, weights: str, capability: str, product: tuple[str, str]
) -> None:
    """In some cases, the KV cache is also in FP8."""
    made = quantized(format, weights=weights, cache=weights == "per_tensor")
    values = (*(model := ir.load(made.file)).graph.inputs, *model.graph.outputs)
    cached = [value.dtype for value in values if "_key_" in value.name or "_value_" in value.name]
    kind = ir.DataType.FLOAT8E4M3FN if weights == "per_tensor" else ir.DataType.BFLOAT16
    assert cached == [kind] * 8
    engine = Engine(made.file, capability)
    routers = {("BFloat16", "bf16"): 2}
    assert engine.products() == {product: len(made.packed), **routers}
    # The tolerance is for the padding of block scales.
    assert engine.weights <= 1.1 * made.file.with_suffix(".bin").stat().st_size


@pytest.mark.parametrize(
    ("format", "capability", "product", "reading"),
    [
        # Lookups also read the INT8 codes.
        ("int8", "SM86", ("Int8", "bf16"), 3),
        ("int8", "SM120", ("Int8", "bf16"), 3),
        ("fp8", "SM89", ("FP8", "fp8"), 2),
        ("fp8", "SM121", ("FP8", "fp8"), 2),
    ],
)
def test_tensorrt_multiplies_by_the_packed_table(
    plain_graphs: Bundle,
    tmp_path: Path,
    format: str,
    capability: str,
    product: tuple[str, str],
    reading: int,
) -> None:
    source, shape = plain_graphs.file("head.onnx"), (96, 64)
    table = np.random.default_rng(0).standard_normal(shape).astype("f")
    if format == "fp8":  # lookups read the unquantized table
        (tmp_path / "embedding.bin").hardlink_to(source.with_name("embedding.bin"))
    quantize_file(
        source,
        tmp_path / "head.onnx",
        {"table": form_of(shape, format)},
        lambda _: quantize_weight([table], format, 6.0),
    )
    engine = Engine(tmp_path / "head.onnx", capability)
    assert engine.products() == {product: 2, ("BFloat16", "bf16"): 2}
    kernels = engine.kernels
    assert reading == sum(any(c.dtype == product[0] for c in each.constants) for each in kernels)
    assert not any(sorted(out.dims) == sorted(shape) for each in kernels for out in each.outputs)
