"""What kernels must move and compute, by hand."""

from __future__ import annotations

import pytest

from canvasrt.errors import CanvasError
from canvasrt.roofline.cost import costs
from canvasrt.roofline.parse import Kernel, KernelTensor

SIZES = {"capacity": 64, "past_full": 1000, "batch": 1, "length": 256}


def kernel(
    kind: str = "kgen", name: str = "__myl_Mul_myl0_1", **tensors: list[KernelTensor]
) -> Kernel:
    held = {key: tuple(tensors.get(key, ())) for key in ("inputs", "constants", "outputs")}
    return Kernel(name, kind, **held, tactic="" if kind == "gemm" else name, nodes=())


def test_a_product_of_experts_in_four_bits() -> None:
    made = kernel(
        "gemm",
        inputs=[
            KernelTensor("x", "FP4E2M1", (128, "capacity", 2816)),
            KernelTensor("s", "FP8", (128, "capacity/128", 4, 32, 44, 4)),
        ],
        constants=[
            KernelTensor("w", "FP4E2M1", (128, 2816, 1408)),
            KernelTensor("one", "Float", (1,)),
            KernelTensor("ws", "FP8", (128, 44, 4, 11, 4, 32)),
        ],
        outputs=[KernelTensor("y", "BFloat16", (128, "capacity", 1408))],
    )
    (cost,) = costs([made], SIZES)
    rows = 128 * 64
    assert cost.operations == 2 * rows * 2816 * 1408
    assert (cost.format, cost.is_product) == ("fp4", True)
    moved = rows * 2816 / 2 + 128 * 128 * 176  # numbers, and scales in whole tiles of 128 rows
    moved += 128 * 2816 * 1408 * (1 / 2 + 1 / 16) + 4
    assert cost.moved == moved + rows * 1408 * 2


def test_weights_narrower_than_their_input_are_multiplied_in_its_format() -> None:
    made = kernel(
        "gemm",
        inputs=[KernelTensor("x", "BFloat16", (256, 2816))],
        constants=[KernelTensor("w", "Int4", (2816, 4224))],
        outputs=[KernelTensor("y", "BFloat16", (256, 4224))],
    )
    (cost,) = costs([made], SIZES)
    assert cost.format == "bf16"
    assert cost.moved == 2 * 256 * 2816 + 2816 * 4224 / 2 + 2 * 256 * 4224


def test_operands_that_are_cast_first_are_multiplied_in_16_bits() -> None:
    tensors = {
        "inputs": [KernelTensor("x", "FP8", (64, "capacity", 256))],
        "constants": [KernelTensor("w", "FP8", (64, 256, 512))],
        "outputs": [KernelTensor("y", "BFloat16", (64, "capacity", 512))],
    }
    assert costs([kernel("gemm", **tensors)], SIZES)[0].format == "fp8"
    cast = kernel("runtime_fusion", "__myl_CastMulCastCastMulCastFc_myl0_2", **tensors)
    assert costs([cast], SIZES)[0].format == "bf16"
    after = kernel("runtime_fusion", "__myl_FcCastDiv_myl0_2", **tensors)
    assert costs([after], SIZES)[0].format == "fp8"


def test_fused_attention_counts_both_products() -> None:
    keys = (1, 8, "past_full+256", 256)
    made = kernel(
        name="_gemm_mha_v2_myl3_8",
        inputs=[
            KernelTensor("k", "BFloat16", keys),
            KernelTensor("v", "BFloat16", keys),
            KernelTensor("q", "BFloat16", (16, 256, 256)),
            KernelTensor("mask", "BFloat16", (1, 1, 256, "past_full+256")),
        ],
        outputs=[KernelTensor("o", "BFloat16", (16, 256, 256))],
    )
    (cost,) = costs([made], SIZES)
    assert cost.operations == 2 * 2 * 16 * 256 * 1256 * 256
    assert (cost.format, cost.is_product) == ("bf16", True)


def test_fused_attention_of_heads_with_keys_of_their_own() -> None:
    """The builder then lists queries first, and keys transposed."""
    made = kernel(
        name="_gemm_mha_v2_myl3_8",
        inputs=[
            KernelTensor("q", "BFloat16", (16, 256, 128)),
            KernelTensor("k", "BFloat16", (16, 128, "past_full+256")),
            KernelTensor("mask", "BFloat16", (1, 1, 256, "past_full+256")),
            KernelTensor("v", "BFloat16", (16, "past_full+256", 128)),
        ],
        outputs=[KernelTensor("o", "BFloat16", (16, 256, 128))],
    )
    (cost,) = costs([made], SIZES)
    assert cost.operations == 2 * 2 * 16 * 256 * 1256 * 128


def test_parts_of_one_tensor_are_read_once() -> None:
    whole = kernel(
        "gemm",
        outputs=[KernelTensor("gu", "BFloat16", (256, 4224))],
        inputs=[KernelTensor("x", "BFloat16", (256, 64))],
        constants=[KernelTensor("w", "BFloat16", (64, 4224))],
    )
    half = KernelTensor("gu", "BFloat16", (256, 2112))
    gelu = kernel(inputs=[half] * 6, outputs=[KernelTensor("y", "BFloat16", (256, 2112))])
    assert costs([whole, gelu], SIZES)[1].moved == 2 * 256 * (4224 + 2112)


def test_a_gather_reads_the_rows_that_it_takes() -> None:
    source = KernelTensor("all", "BFloat16", (128, "capacity", 2816), read="2048*2816")
    made = kernel(inputs=[source], outputs=[KernelTensor("y", "BFloat16", (256, 8, 2816))])
    assert costs([made], SIZES)[0].moved == 2 * 2 * 2048 * 2816
    assert costs([made], SIZES | {"capacity": 4})[0].moved == 2 * (128 * 4 + 2048) * 2816


def test_a_scatter_in_place_writes_what_it_is_given() -> None:
    buffer = KernelTensor("slots", "Int64", ("128*capacity+1",))
    made = kernel(
        inputs=[
            buffer,
            KernelTensor("at", "Int64", (2048,)),
            KernelTensor("from", "Int64", (2048,)),
        ],
        outputs=[buffer],
    )
    assert costs([made], SIZES)[0].moved == 8 * 3 * 2048


def test_steps_by_name_are_operations() -> None:
    made = kernel(
        name="__myl_MulTanhAdd_0xabc",
        inputs=[KernelTensor("x", "Float", (256, 100))],
        outputs=[KernelTensor("y", "Float", (256, 100))],
    )
    (cost,) = costs([made], SIZES)
    assert (cost.operations, cost.format, cost.is_product) == (3 * 25_600, "fp32", False)


def test_a_size_that_could_not_be_named_is_an_error() -> None:
    made = kernel(inputs=[KernelTensor("x", "Float", ("?", 3))])
    with pytest.raises(CanvasError, match=r"'\?'"):
        costs([made], SIZES)
