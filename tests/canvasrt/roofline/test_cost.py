"""The bytes and operations of kernels, compared with numbers calculated by hand."""

from __future__ import annotations

import re

import pytest

from canvasrt.errors import CanvasError
from canvasrt.roofline.cost import Cost, costs
from canvasrt.roofline.dims import Dim
from canvasrt.roofline.parse import Kernel
from canvasrt.roofline.parse import KernelTensor as Tensor

SIZES = {"capacity": 64, "past_full": 1000, "batch": 1, "length": 256}
ATTENTION = "_gemm_mha_v2_myl3_8"


def kernel(kind: str = "kgen", name: str = "__myl_Mul_myl0_1", **tensors: list[Tensor]) -> Kernel:
    held = {key: tuple(tensors.get(key, ())) for key in ("inputs", "constants", "outputs")}
    return Kernel(name, kind, **held, tactic="" if kind == "gemm" else name, nodes=())


def bf16(name: str, *dims: Dim) -> Tensor:
    return Tensor(name, "BFloat16", dims)


def cost(made: Kernel, **sizes: int) -> Cost:
    return costs([made], SIZES | sizes)[0]


def test_a_product_of_experts_in_four_bits() -> None:
    scales = ("capacity/128", 4, 32, 44, 4)
    found = cost(
        kernel(
            "gemm",
            inputs=[
                Tensor("x", "FP4E2M1", (128, "capacity", 2816)),
                Tensor("s", "FP8", (128, *scales)),
            ],
            constants=[
                Tensor("w", "FP4E2M1", (128, 2816, 1408)),
                Tensor("one", "Float", (1,)),
                Tensor("ws", "FP8", (128, 44, 4, 11, 4, 32)),
            ],
            outputs=[bf16("y", 128, "capacity", 1408)],
        )
    )
    rows = 128 * 64
    assert found.operations == 2 * rows * 2816 * 1408
    assert (found.format, found.is_product) == ("fp4", True)
    moved = rows * 2816 / 2 + 128 * 128 * 176  # codes, and scales in whole tiles of 128 rows
    moved += 128 * 2816 * 1408 * (1 / 2 + 1 / 16) + 4
    assert found.moved == moved + rows * 1408 * 2


def test_weights_narrower_than_their_input_are_multiplied_in_its_format() -> None:
    weights = [Tensor("w", "Int4", (2816, 4224))]
    x, y = bf16("x", 256, 2816), bf16("y", 256, 4224)
    found = cost(kernel("gemm", inputs=[x], constants=weights, outputs=[y]))
    assert found.format == "bf16"
    assert found.moved == 2 * 256 * 2816 + 2816 * 4224 / 2 + 2 * 256 * 4224


@pytest.mark.parametrize(
    ("kind", "name", "format"),
    [
        ("gemm", "__myl_Mul_myl0_1", "fp8"),
        ("runtime_fusion", "__myl_CastMulCastCastMulCastFc_myl0_2", "bf16"),
        ("runtime_fusion", "__myl_FcCastDiv_myl0_2", "fp8"),
    ],
)
def test_operands_that_are_cast_first_are_multiplied_in_16_bits(
    kind: str, name: str, format: str
) -> None:
    tensors = {
        "inputs": [Tensor("x", "FP8", (64, "capacity", 256))],
        "constants": [Tensor("w", "FP8", (64, 256, 512))],
        "outputs": [bf16("y", 64, "capacity", 512)],
    }
    assert cost(kernel(kind, name, **tensors)).format == format


SHARED, MASK = (1, 8, "past_full+256", 256), bf16("mask", 1, 1, 256, "past_full+256")


@pytest.mark.parametrize(
    ("width", "inputs"),
    [
        (256, [bf16("k", *SHARED), bf16("v", *SHARED), bf16("q", 16, 256, 256), MASK]),
        # If every head has its own keys, the builder lists queries first, and keys transposed.
        (
            128,
            [
                *(bf16("q", 16, 256, 128), bf16("k", 16, 128, "past_full+256")),
                *(MASK, bf16("v", 16, "past_full+256", 128)),
            ],
        ),
    ],
)
def test_fused_attention_counts_both_products(width: int, inputs: list[Tensor]) -> None:
    found = cost(kernel(name=ATTENTION, inputs=inputs, outputs=[bf16("o", 16, 256, width)]))
    assert found.operations == 2 * 2 * 16 * 256 * 1256 * width
    assert (found.format, found.is_product) == ("bf16", True)


def test_parts_of_one_tensor_are_read_once() -> None:
    x, weights = bf16("x", 256, 64), bf16("w", 64, 4224)
    whole = kernel("gemm", inputs=[x], constants=[weights], outputs=[bf16("gu", 256, 4224)])
    gelu = kernel(inputs=[bf16("gu", 256, 2112)] * 6, outputs=[bf16("y", 256, 2112)])
    assert costs([whole, gelu], SIZES)[1].moved == 2 * 256 * (4224 + 2112)


def test_a_gather_reads_the_rows_that_it_takes() -> None:
    source = Tensor("all", "BFloat16", (128, "capacity", 2816), read="2048*2816")
    made = kernel(inputs=[source], outputs=[bf16("y", 256, 8, 2816)])
    assert cost(made).moved == 2 * 2 * 2048 * 2816
    assert cost(made, capacity=4).moved == 2 * (128 * 4 + 2048) * 2816


def test_a_scatter_in_place_writes_what_it_is_given() -> None:
    buffer = Tensor("slots", "Int64", ("128*capacity+1",))
    given = [Tensor(name, "Int64", (2048,)) for name in ("at", "from")]
    assert cost(kernel(inputs=[buffer, *given], outputs=[buffer])).moved == 8 * 3 * 2048


def test_steps_by_name_are_operations() -> None:
    x, y = (Tensor(name, "Float", (256, 100)) for name in "xy")
    found = cost(kernel(name="__myl_MulTanhAdd_0xabc", inputs=[x], outputs=[y]))
    assert (found.operations, found.format, found.is_product) == (3 * 25_600, "fp32", False)


@pytest.mark.parametrize("size", ["?", "past_sliding"])
def test_a_size_that_could_not_be_named_is_an_error(size: str) -> None:
    with pytest.raises(CanvasError, match=re.escape(repr(size))):
        cost(kernel(inputs=[Tensor("x", "Float", (size, 3))]))
