"""FP8, NVFP4 and INT4, compared with ModelOpt's quantization; INT4 is also compared with an implementation in this
file."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from canvasrt.errors import CanvasError
from canvasrt.export.quantize.quantizers import form_of, quantize_weight
from canvasrt.formats import FORMATS
from canvasrt.graphs import lowbits
from canvasrt.graphs.packed import Packed
from tests.helpers import rounding as oracle
from tests.helpers.quantized import dequantize


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.uniform(-6, 2, (*shape[:-1], 1)))).astype("f")


def test_nvfp4_weights_are_modelopt_s() -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    given = weight(48, 64)
    given[0, :16] = 0
    packed = quantize_weight([given], "nvfp4", 3.0)
    theirs, blocks, scale = NVFP4QTensor.quantize(torch.from_numpy(given.copy()), 16)
    assert packed.scale == scale.numpy()
    assert packed.block_scales is not None
    np.testing.assert_array_equal(packed.block_scales, blocks.view(torch.uint8).numpy())
    np.testing.assert_array_equal(packed.values, theirs._quantized_data.numpy())
    wide = theirs.dequantize(torch.float32, scale=blocks, double_scale=scale, block_sizes={-1: 16})
    np.testing.assert_allclose(dequantize(packed), wide.numpy(), rtol=1e-6)


def test_activations_are_rounded_as_modelopt_rounds_a_tensor() -> None:
    """ModelOpt's dynamic NVFP4 quantizer needs a GPU. Its tensor class uses the same grid on a CPU."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x, amax = weight(32, 96, seed=3), 5.0
    scale = torch.tensor(amax / (6 * 448))
    theirs, blocks, _ = NVFP4QTensor.quantize(
        torch.from_numpy(x.copy()), 16, weights_scaling_factor_2=scale
    )
    wide = theirs.dequantize(torch.float32, scale=blocks, double_scale=scale, block_sizes={-1: 16})
    np.testing.assert_allclose(oracle.round_nvfp4(x, float(scale)), wide.numpy(), rtol=1e-6)


def bf16(x: float) -> np.float32:
    """Round to the nearest bfloat16."""
    return torch.tensor(x).bfloat16().float().numpy()[()]


@pytest.mark.parametrize(("width", "block"), [(128, 64), (96, 32), (64, 32), (32, 16)])
def test_int4_rounds_each_block_to_its_own_scale(width: int, block: int) -> None:
    given = weight(6, width, seed=4)
    given[0, :block] = 0
    given[1, :block] = np.arange(block) % 8 + 0.5  # ties
    packed = quantize_weight([given], "int4", None)
    assert packed.form == form_of(given.shape, "int4")
    assert (packed.form.block, packed.scale, packed.input_scale) == (block, None, None)
    expected = []
    for each in given.reshape(-1, block):
        step = bf16(float(np.abs(each).max() / np.float32(7))) if each.any() else np.float32(1)
        expected.append([min(max(round(float(x / step)), -8), 7) * step for x in each])
    np.testing.assert_array_equal(dequantize(packed), np.reshape(expected, given.shape))
    # A byte holds two numbers in two's complement, the first of them in the low four bits.
    first = packed.values[1, 0]
    numbers = [(int(code) + 8) % 16 - 8 for code in (first & 15, first >> 4)]
    steps = packed.block_scales[1, 0]
    np.testing.assert_array_equal(np.float32(numbers) * steps, dequantize(packed)[1, :2])


def test_int4_experts_are_quantized_each_by_itself() -> None:
    given = [weight(32, 64, seed=i) * np.float32(size) for i, size in enumerate((1, 0.01, 30))]
    for method in ("max", "mse"):
        packed = quantize_weight(iter(given), "int4", None, method, experts=True)
        assert packed.form == form_of((3, 32, 64), "int4", experts=True)
        for expert, alone in zip(dequantize(packed), given, strict=True):
            found = dequantize(quantize_weight([alone], "int4", None, method))
            np.testing.assert_array_equal(expert, found)


@pytest.mark.parametrize("weights", ["per_tensor", "per_channel"])
def test_fp8_is_modelopt_s_fake_quantization(weights: str) -> None:
    from modelopt.torch.quantization.tensor_quant import scaled_e4m3

    given = weight(48, 64)
    packed = quantize_weight([given], "fp8", 3.0, weights=weights)
    amax = np.abs(given).max(axis=-1, keepdims=True) if weights == "per_channel" else given.max()
    amax = torch.from_numpy(np.abs(given).max(keepdims=True) if weights == "per_tensor" else amax)
    theirs = scaled_e4m3(torch.from_numpy(given), amax, None, 4, 3).numpy()
    found = dequantize(packed)
    # Multiplying by 448 / amax and dividing by amax / 448 differ in the last bit, so a few ties are rounded
    # differently.
    same = np.isclose(found, theirs, rtol=1e-5, atol=0)
    assert same.mean() > 0.999
    np.testing.assert_allclose(found, theirs, rtol=0.13, atol=1e-6)
    x = weight(8, 64, seed=2)
    theirs = scaled_e4m3(torch.from_numpy(x), torch.tensor(3.0), None, 4, 3).numpy()
    found = oracle.round_fp8(x, float(packed.input_scale))
    assert np.isclose(found, theirs, rtol=1e-5, atol=0).mean() > 0.999


def experts() -> list[np.ndarray]:
    """Return experts of very different magnitudes, and one of zeros."""
    sizes = (1, 0.01, 30, 0)
    return [weight(32, 48, seed=i) * np.float32(size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("format", "method", "weights"),
    [
        *itertools.product(("fp8", "nvfp4"), ("max", "mse"), ("per_tensor",)),
        ("fp8", "max", "per_channel"),
    ],
)
def test_experts_have_scales_of_their_own_behind_one(format, method, weights) -> None:
    packed = quantize_weight(iter(experts()), format, 3.0, method, weights, experts=True)
    assert packed.form == form_of((4, 32, 48), format, weights, experts=True)
    assert packed.scale.shape == ()
    assert packed.factor is not None
    assert (packed.factor > 0).all()
    # Every factor is exact in bfloat16, so multiplying a bfloat16 product by it is exact up to one rounding.
    assert (lowbits.from_bf16(lowbits.to_bf16(packed.factor)) == packed.factor).all()
    found = dequantize(packed)
    for expert, given in zip(found, experts(), strict=True):
        error = np.linalg.norm(expert - given) / max(np.linalg.norm(given), 1e-9)
        assert error < (0.03 if format == "fp8" else 0.12)
        alone = quantize_weight([given], format, 3.0, method, weights)
        np.testing.assert_allclose(
            np.linalg.norm(dequantize(alone) - given), error * np.linalg.norm(given), rtol=0.1
        )


@pytest.mark.parametrize("format", FORMATS)
def test_the_least_error_is_no_larger(format: str) -> None:
    given = weight(64, 64, seed=5)
    errors = [
        np.square(dequantize(quantize_weight([given], format, 3.0, method)) - given).sum()
        for method in ("max", "mse")
    ]
    assert errors[1] <= errors[0] * 1.001
    if FORMATS[format].blocks:
        assert errors[1] < 0.9 * errors[0]


def test_the_least_error_may_saturate() -> None:
    """Nearly all numbers are 0.90625, which FP8 represents exactly at a scale at which the largest number saturates."""
    given = np.full((32, 32), 0.90625, np.float32)
    given[3, 4] = 1
    found = dequantize(quantize_weight([given], "fp8", 3.0, "mse"))
    np.testing.assert_allclose(found, np.full((32, 32), 0.90625), rtol=1e-6)


def test_zeros_have_a_scale() -> None:
    for format, method in itertools.product(FORMATS, ("max", "mse")):
        packed = quantize_weight([np.zeros((16, 32), np.float32)], format, 1.0, method)
        scale = packed.block_scales if packed.scale is None else packed.scale
        assert np.isfinite(scale).all()
        assert (scale > 0).all()
        assert (dequantize(packed) == 0).all()


def test_what_cannot_be_quantized_is_refused() -> None:
    good = weight(16, 32)
    for amax in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(CanvasError, match=r"mlp\.down: its input's largest magnitude"):
            quantize_weight([good], "fp8", amax, name="mlp.down")
    bad = good.copy()
    bad[3, 3] = np.nan
    with pytest.raises(CanvasError, match=r"mlp\.down contains numbers that are not finite"):
        quantize_weight([bad], "fp8", 1.0, name="mlp.down")
    with pytest.raises(CanvasError, match=r"mlp\.down has rows of 24, but nvfp4 has blocks of 16"):
        quantize_weight([weight(16, 24)], "nvfp4", 1.0, name="mlp.down")
    with pytest.raises(CanvasError, match="rows of 40, but int4 has blocks of 64, 32 or 16"):
        quantize_weight([weight(16, 40)], "int4", None)
    one = np.ones((), np.float32)
    for scale in (-one, 0 * one, np.float32("nan") * one):
        with pytest.raises(CanvasError, match="scale contains numbers that are not positive"):
            Packed("fp8", np.zeros((2, 2), np.uint8), np.array(scale), one)
