"""The experts' weights for kernels between pieces equal the weights of the graph."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from canvasrt.bundle import Bundle
from canvasrt.errors import CanvasError
from canvasrt.graphs import lowbits
from canvasrt.graphs.packed import Packed
from canvasrt.sorted_rows.description import ExpertSizes, KernelForm, inputs_per_step
from canvasrt.sorted_rows.stacks import GraphExperts, in_steps
from tests.helpers.quantized import SHAPE, Quantized

SIZES = ExpertSizes(
    SHAPE["num_experts"],
    SHAPE["top_k_experts"],
    SHAPE["hidden_size"],
    SHAPE["moe_intermediate_size"],
)
WEIGHTS = [f"layers.{layer}.experts.{name}" for layer in range(2) for name in ("gate_up", "down")]


def from_steps(data: np.ndarray, width: int, step: int) -> np.ndarray:
    """Unpack stored steps to rows of `width` codes 0 … 15, in the order of columns."""
    each = data.reshape(-1, width // step, 1, step // 2)
    return np.concatenate([each & 15, each >> 4], axis=2).reshape(-1, width)


def stacks(format: str, made: Quantized):
    """Yield each weight's kernel form, values, block scales, output scales, its form in the graph, and its layer."""
    experts = GraphExperts(ir.load(made.file), SIZES, dict.fromkeys(WEIGHTS, format))
    file = io.BytesIO()
    layers, data = experts.write(file), file.getvalue()
    for number, (forms, layer) in enumerate(zip(experts.forms, layers, strict=True)):
        for form, stack, name in zip(
            forms, (layer.gate_up, layer.down), ("gate_up", "down"), strict=True
        ):
            values, blocks, scales = (
                np.frombuffer(data, np.uint8, size, begin)
                for begin, size in (stack.values, stack.blocks, stack.scales)
            )
            assert stack.kernel == form.name
            packed = made.packed[f"layers.{number}.experts.{name}"]
            yield form, values, blocks, scales, packed, layer


def test_int4(quantized: Callable[..., Quantized]) -> None:
    for form, values, blocks, scales, packed, _ in stacks("int4", quantized("int4")):
        assert form.block == form.width // packed.block_scales.shape[-1]
        codes = from_steps(values, form.width, inputs_per_step(form))
        pairs = packed.values.reshape(-1, form.width // 2)
        assert (codes[:, 0::2] == pairs & 15).all()
        assert (codes[:, 1::2] == pairs >> 4).all()
        assert blocks.tobytes() == lowbits.to_bf16(packed.block_scales).tobytes()
        assert not scales.size


def test_a_weight_file_may_be_part_of_several_bundles(
    quantized: Callable[..., Quantized], tmp_path: Path
) -> None:
    made, link = quantized("nvfp4"), tmp_path / "body_0.bin"
    link.hardlink_to(made.file.with_suffix(".bin"))
    try:
        assert len(list(stacks("nvfp4", made))) == len(WEIGHTS)
    finally:
        link.unlink()


def output_scales(packed: Packed) -> np.ndarray:
    """Return the scale of FP8 or NVFP4 weights times the scale of their inputs, per output."""
    factor = np.float32(1) if packed.factor is None else packed.factor
    factor = lowbits.from_bf16(lowbits.to_bf16(factor)).reshape(np.shape(factor))
    rows = (SIZES.experts, packed.shape[1])
    return np.broadcast_to(packed.scale * packed.input_scale * factor[..., 0, :], rows)


@pytest.mark.parametrize(
    ("format", "weights"),
    [("fp8", "per_tensor"), ("fp8", "per_channel"), ("nvfp4", "max"), ("nvfp4", "mse")],
)
def test_fp8_and_nvfp4(quantized: Callable[..., Quantized], format: str, weights: str) -> None:
    made, packs = quantized(format, ("experts.",), weights), format == "nvfp4"
    for form, values, blocks, scales, packed, layer in stacks(format, made):
        assert values.tobytes() == packed.values.tobytes()
        assert blocks.tobytes() == (packed.block_scales.tobytes() if packs else b"")
        found = scales.view(np.float32).reshape(SIZES.experts, -1)
        np.testing.assert_array_equal(found, output_scales(packed))
        # For FP8, the piece before the experts rounds tokens. For NVFP4, a kernel does.
        assert layer.rounding == ("round_rows-bfloat16" if packs else None)
        scale = layer.inner_scale if form.function == "down" else layer.input_scale
        assert scale == np.float32(packed.input_scale)
        assert form.following == (None if form.function == "down" else format)


def test_plain(plain_graphs: Bundle) -> None:
    model = ir.load(plain_graphs.file("body_0.onnx"))
    experts, file = GraphExperts(model, SIZES, {}), io.BytesIO()
    for number, layer in enumerate(experts.write(file)):
        for name, stack in (("gate_up", layer.gate_up), ("down", layer.down)):
            stored = model.graph.initializers[f"layers.{number}.experts.{name}"].const_value
            begin, size = stack.values
            assert file.getvalue()[begin : begin + size] == stored.tobytes()
    assert experts.dtype == "bfloat16"


def test_a_format_without_a_kernel_is_refused() -> None:
    form = KernelForm("down", ExpertSizes(2, 1, 64, 64), "bfloat16", "mxfp4")
    with pytest.raises(CanvasError, match="do not support experts in mxfp4"):
        inputs_per_step(form)


@pytest.mark.parametrize(("width", "block", "step"), [(64, 64, 64), (128, 32, 64), (96, 16, 32)])
def test_a_step_holds_its_first_half_in_the_low_bits(width: int, block: int, step: int) -> None:
    sizes = ExpertSizes(2, 1, width, 64)
    form = KernelForm("gate_up", sizes, "bfloat16", "int4", None, block)
    assert inputs_per_step(form) == step
    codes = np.random.default_rng(0).integers(0, 16, (3, width)).astype(np.uint8)
    assert (from_steps(in_steps(lowbits.pack(codes), width, step), width, step) == codes).all()


@pytest.mark.parametrize(("width", "block"), [(48, 16), (64, 8), (144, 48)])
def test_int4_rows_that_fill_no_step_are_refused(width: int, block: int) -> None:
    form = KernelForm("gate_up", ExpertSizes(2, 1, width, 64), "bfloat16", "int4", None, block)
    with pytest.raises(CanvasError, match=f"INT4 experts with {width} inputs in blocks of {block}"):
        inputs_per_step(form)
