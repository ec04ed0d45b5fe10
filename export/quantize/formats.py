"""Weights in FP8 and NVFP4 as they stand in a graph, quantized by ModelOpt.

Imports neither torch nor ModelOpt until something is quantized.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.graphs import lowbits
from canvasrt.graphs.lowbits import BLOCK, E2M1_MAX, E4M3_MAX, Bytes, Floats

if TYPE_CHECKING:
    from torch import Tensor

Format = Literal["fp8", "nvfp4"]
FORMATS: tuple[Format, ...] = ("fp8", "nvfp4")
# What a scale of 1 reaches: FP8's largest number, NVFP4's times the largest block scale.
LARGEST = {"fp8": E4M3_MAX, "nvfp4": E2M1_MAX * E4M3_MAX}


@dataclass(frozen=True)
class Form:
    """A quantized weight's format and shapes, without its numbers; the attributes are `Packed`'s."""

    format: Format
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...] = ()
    factor_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Packed:
    """One quantized weight. It stands for `values × block_scales × scale × factor`, `[out, in]` or `[E, out, in]`.

    Attributes:
        format: `fp8` or `nvfp4`.
        values: uint8; E4M3 codes `[…, out, in]`, or two E2M1 codes a byte `[…, out, in / 2]`, the first one low.
        scale: float32, a scalar; of a 2-D FP8 weight also one for each output, `[out]`.
        input_scale: float32 scalar, the scale of what the weight is multiplied with.
        block_scales: NVFP4's E4M3 codes `[…, out, in / 16]`.
        factor: float32 by which the product is multiplied: `[E, 1, 1]`, `[E, 1, out]`, of a 2-D weight `[out]`.
    """

    format: Format
    values: Bytes
    scale: Floats
    input_scale: Floats
    block_scales: Bytes | None = None
    factor: Floats | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "input_scale", "factor"):
            found = getattr(self, name)
            if found is not None and not (np.isfinite(found) & (found > 0)).all():
                raise CanvasError(
                    f"a weight's {name} holds numbers that are not positive and finite",
                    "calibrate again, or take a checkpoint with whole scales",
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, `[out, in]` or `[E, out, in]`."""
        *rows, last = self.values.shape
        return (*rows, last * 2 if self.format == "nvfp4" else last)

    @property
    def form(self) -> Form:
        """What the graph has to know of it."""
        factor = None if self.factor is None else self.factor.shape
        return Form(self.format, self.shape, self.scale.shape, factor)


def dequantize(packed: Packed) -> Floats:
    """The weight that `packed` stands for, its factor included."""
    if packed.block_scales is None:
        weight = lowbits.dequantize_fp8(packed.values, packed.scale)
    else:
        weight = lowbits.dequantize_nvfp4(packed.values, packed.block_scales, packed.scale)
    if packed.factor is None:
        return weight
    factor = packed.factor if packed.factor.ndim == 1 else packed.factor[..., 0, :]
    return weight * factor[..., None]


def form_of(
    shape: tuple[int, ...],
    format: Format,
    weights: Literal["per_tensor", "per_channel"] = "per_tensor",
    experts: bool = False,
) -> Form:
    """The form of what `quantize` makes of a weight of this shape."""
    channels = format == "fp8" and weights == "per_channel"
    if experts:
        return Form(format, shape, (), (shape[0], 1, shape[1] if channels else 1))
    return Form(format, shape, (shape[0],) if channels else ())


def quantize(
    parts: Iterable[np.ndarray],
    format: Format,
    input_amax: float,
    method: Literal["max", "mse"] = "max",
    weights: Literal["per_tensor", "per_channel"] = "per_tensor",
    experts: bool = False,
    name: str = "weight",
) -> Packed:
    """Quantize a weight with ModelOpt.

    Args: `parts` float32 matrices `[out, in]`, read one at a time: one an expert with `experts`, else stacked along
    the first axis to one weight; `input_amax` the largest magnitude of what it is multiplied with; `method` how scales
    are chosen, `max` so that nothing saturates and `mse` for the least squared error; `weights` whether FP8 has a scale
    for each output; `name` what errors call it. Raises `CanvasError` for numbers that are not finite, an
    `input_amax` that is not positive, and an NVFP4 weight whose rows are no multiple of 16.
    """
    if not (math.isfinite(input_amax) and input_amax > 0):
        raise CanvasError(
            f"{name}: its input's largest magnitude is {input_amax}", "calibrate with more prompts"
        )
    input_scale = np.float32(input_amax / LARGEST[format])
    channels = format == "fp8" and weights == "per_channel"
    each = parts if experts else [np.concatenate(list(parts))]
    quantized = [_quantize_one(part, format, method, channels, experts, name) for part in each]
    values = np.stack([one.values for one in quantized])
    scales = np.stack([one.scale for one in quantized])
    blocks = (
        np.stack([one.block_scales for one in quantized if one.block_scales is not None])
        if format == "nvfp4"
        else None
    )
    if not experts:
        block_scales = None if blocks is None else blocks[0]
        return Packed(format, values[0], scales[0], np.array(input_scale), block_scales)
    # A power of two beside factors that are bfloat16: nothing is lost in whatever dtype the product is.
    scale = np.exp2(np.floor(np.log2(scales.max()))).astype(np.float32)
    factor = (scales / scale).reshape(len(quantized), 1, -1)
    return Packed(format, values, np.array(scale), np.array(input_scale), blocks, factor)


def _quantize_one(
    part: np.ndarray, format: Format, method: str, channels: bool, short_scale: bool, name: str
) -> Packed:
    """A matrix with a scale of its own; `short_scale` rounds it up to a bfloat16."""
    import torch

    weight = torch.from_numpy(np.ascontiguousarray(part, np.float32))
    if not torch.isfinite(weight).all():
        raise CanvasError(f"{name} holds numbers that are not finite", "the checkpoint is damaged")
    if format == "nvfp4" and weight.shape[-1] % BLOCK:
        raise CanvasError(
            f"{name} has rows of {weight.shape[-1]}, and NVFP4 has blocks of {BLOCK}",
            "leave it out of the recipe, or quantize it to fp8",
        )
    amax = weight.abs().amax(dim=-1, keepdim=True) if channels else weight.abs().amax()
    # Zeros need a scale too, and any will do.
    amax = torch.where(amax > 0, amax.clamp(min=2.0**-60), torch.ones_like(amax))
    if format == "fp8" and method == "mse":
        amax = _least_error_fp8(weight, amax)
    scale = amax / LARGEST[format]
    if short_scale:
        scale = _round_up(scale)
    encode = _fp8 if format == "fp8" else _nvfp4_mse if method == "mse" else _nvfp4_max
    values, block_scales = encode(weight, scale)
    blocks = None if block_scales is None else block_scales.view(torch.uint8).numpy()
    flat = scale.numpy().reshape(-1) if channels else scale.numpy()
    return Packed(format, values.view(torch.uint8).numpy(), flat, np.ones((), np.float32), blocks)


def _fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, None]:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    quantized, _ = FP8QTensor.quantize(weight, scales=scale)
    return quantized._quantized_data, None


def _nvfp4_max(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantized, blocks, _ = NVFP4QTensor.quantize(weight, BLOCK, weights_scaling_factor_2=scale)
    return quantized._quantized_data, blocks


def _nvfp4_mse(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of all E4M3 numbers the best scale for each block."""
    import torch
    from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def round_with(x: Tensor, amax: Tensor) -> Tensor:
        step = (amax / E2M1_MAX)[:, None]
        codes = NVFP4QTensor._cast_fp4(x / step)
        return NVFP4QTensor.get_e2m1_values(x.device)[codes.long()] * step

    blocks = weight.reshape(-1, BLOCK)
    amax = blocks.abs().amax(dim=-1)
    calibrator = NVFP4MSECalibrator(amax, scale * LARGEST["nvfp4"], axis=0, quant_func=round_with)
    calibrator.collect(blocks)
    best = calibrator.compute_amax() / (E2M1_MAX * scale)
    scales = best.to(torch.float8_e4m3fn).reshape(*weight.shape[:-1], -1)
    quantized, _, _ = NVFP4QTensor.quantize(
        weight, BLOCK, weights_scaling_factor=scales, weights_scaling_factor_2=scale
    )
    return quantized._quantized_data, scales


def _least_error_fp8(weight: Tensor, amax: Tensor) -> Tensor:
    """The amax, for all of it or for each row, with the least squared error."""
    from modelopt.torch.quantization.calib.mse import MseCalibrator
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    axis = 0 if amax.dim() else None
    calibrator = MseCalibrator(amax, axis=axis, quant_func=fp8_eager, stop_multiplier=1.0)
    calibrator.collect(weight)
    return calibrator.compute_amax().view_as(amax)


def _round_up(scale: Tensor) -> Tensor:
    """The next bfloat16 that is not smaller."""
    import torch

    bits = scale.view(torch.int32)
    return (bits + 0xFFFF & ~0xFFFF).view(torch.float32)
