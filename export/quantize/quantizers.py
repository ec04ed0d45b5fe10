"""Quantizes weights to the formats of `canvasrt.formats`. ModelOpt is imported only when needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from canvasrt.errors import CanvasError
from canvasrt.formats import E2M1, FORMATS
from canvasrt.graphs import lowbits
from canvasrt.graphs.lowbits import Bytes, Floats
from canvasrt.graphs.packed import Form, Packed

# The search for a block's scale starts at this share of the block's largest magnitude. Smaller shares were never best.
_LEAST_REACH = 0.7


def form_of(
    shape: tuple[int, ...],
    format: str,
    weights: Literal["per_tensor", "per_channel"] = "per_tensor",
    experts: bool = False,
) -> Form:
    """Return the form that `quantize_weight` gives a weight of this shape."""
    block = FORMATS[format].block(shape[-1])
    if not FORMATS[format].rounds_inputs:
        return Form(format, shape, () if block else (shape[0],), block=block)
    channels = not FORMATS[format].blocks and weights == "per_channel"
    if experts:
        return Form(format, shape, (), (shape[0], 1, shape[1] if channels else 1), block)
    return Form(format, shape, (shape[0],) if channels else (), block=block)


def quantize_weight(
    parts: Iterable[np.ndarray],
    format: str,
    input_amax: float | None,
    method: Literal["max", "mse"] = "max",
    weights: Literal["per_tensor", "per_channel"] = "per_tensor",
    experts: bool = False,
    name: str = "weight",
) -> Packed:
    """Quantize a weight with ModelOpt.

    Args:
        parts: float32 matrices `[out, in]`, read one at a time. If `experts` is true, each matrix is one expert's;
        otherwise matrices are stacked along the first axis.
        input_amax: the input's largest magnitude. Weight-only formats ignore it.
        method: how scales are chosen: with `max`, nothing saturates; with `mse`, the squared error is smallest.
        weights: with `per_channel`, FP8 has one scale per output. Formats with blocks ignore it.
        name: the weight's name, for errors.

    Raises `CanvasError` for numbers that are not finite, an `input_amax` that is not positive and finite, and a row
    length that is not a multiple of the format's block length.
    """
    if not FORMATS[format].rounds_inputs:
        return _quantize_weights(parts, format, method, experts, name)
    input_scale = _input_scale(format, input_amax, name)
    channels = not FORMATS[format].blocks and weights == "per_channel"
    each = parts if experts else [np.concatenate(list(parts))]
    quantized = [_quantize_one(part, format, method, channels, experts, name) for part in each]
    values, scales, *found = (np.stack(every) for every in zip(*quantized, strict=True))
    blocks = found[0] if found else None
    if not experts:
        block_scales = None if blocks is None else blocks[0]
        return Packed(format, values[0], scales[0], np.array(input_scale), block_scales)
    # The scale is a power of two, and factors are exact in bfloat16, so every dtype of the product represents both.
    scale = np.exp2(np.floor(np.log2(scales.max()))).astype(np.float32)
    factor = (scales / scale).reshape(len(quantized), 1, -1)
    return Packed(format, values, np.array(scale), np.array(input_scale), blocks, factor)


def quantize_in_parts(
    parts: Callable[[], Iterable[np.ndarray]], format: str, input_amax: float, name: str
) -> Packed:
    """Quantize a matrix that does not fit in memory, with one scale that covers its largest number.

    parts: a function that returns the rows in order, float32 `[…, in]`. It is called twice. All other arguments are as
    in `quantize_weight`.
    """
    amax = max(float(np.abs(part).max()) for part in parts())
    scale = np.float32(max(amax, 2.0**-60) / FORMATS[format].largest)
    _, encode = _QUANTIZERS[format]["max"]
    every = torch.tensor(scale)
    codes = [encode(_checked(part, format, name), every)[0] for part in parts()]
    values = np.concatenate([each.view(torch.uint8).numpy() for each in codes])
    return Packed(format, values, np.array(scale), np.array(_input_scale(format, input_amax, name)))


def _input_scale(format: str, amax: float | None, name: str) -> np.float32:
    """Return the scale of a product's input. Raises CanvasError if `amax` is None, not positive or not finite."""
    if amax is None or not (math.isfinite(amax) and amax > 0):
        raise CanvasError(
            f"{name}: its input's largest magnitude is {amax}", "calibrate with more prompts"
        )
    return np.float32(amax / FORMATS[format].largest)


def _quantize_one(
    part: np.ndarray, format: str, method: str, channels: bool, short_scale: bool, name: str
) -> tuple[np.ndarray, ...]:
    """Quantize a matrix with its own scale, which is rounded up to a bfloat16 if `short_scale` is true. Return codes,
    scale and, if the format has blocks, the blocks' scales."""
    weight = _checked(part, format, name)
    amax = _positive(weight.abs().amax(dim=-1, keepdim=True) if channels else weight.abs().amax())
    search, encode = _QUANTIZERS[format][method]
    scale = (search(weight, amax) if search else amax) / FORMATS[format].largest
    if short_scale:
        scale = _round_up(scale)
    values, block_scales = encode(weight, scale)
    flat = scale.numpy().reshape(-1) if channels else scale.numpy()
    blocks = [] if block_scales is None else [block_scales.view(torch.uint8).numpy()]
    return values.view(torch.uint8).numpy(), flat, *blocks


def _quantize_weights(
    parts: Iterable[np.ndarray], format: str, method: str, experts: bool, name: str
) -> Packed:
    """Quantize a weight to a weight-only format, which leaves the inputs of products unquantized."""
    encode, join = _WEIGHTS_ALONE[format], np.stack if experts else np.concatenate
    # Every row has its own scales, so parts of a matrix can be quantized one by one.
    made = [encode(_checked(part, format, name), method == "mse") for part in parts]
    values, scales = join([each for each, _ in made]), join([each for _, each in made])
    if FORMATS[format].blocks:
        return Packed(format, values, None, None, scales)
    return Packed(format, values, scales, None)


def _checked(part: np.ndarray, format: str, name: str) -> Tensor:
    """Return a matrix as a tensor. Raises CanvasError if it cannot be quantized."""
    weight = torch.from_numpy(np.ascontiguousarray(part, np.float32))
    if not torch.isfinite(weight).all():
        raise CanvasError(
            f"{name} contains numbers that are not finite", "the checkpoint is damaged"
        )
    if not FORMATS[format].divides(weight.shape[-1]):
        raise CanvasError(
            f"{name} has rows of {weight.shape[-1]}, but {format} has {FORMATS[format].blocks_text}",
            "leave it out of the recipe, or quantize it to fp8",
        )
    return weight


def _positive(amax: Tensor) -> Tensor:
    """Replace magnitudes that are zero or tiny. If all numbers that share a scale are zero, any scale will do."""
    return torch.where(amax > 0, amax.clamp(min=2.0**-60), torch.ones_like(amax))


def _fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, None]:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    quantized, _ = FP8QTensor.quantize(weight, scales=scale)
    return quantized._quantized_data, None


def _nvfp4_max(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    (block,) = FORMATS["nvfp4"].blocks
    quantized, blocks, _ = NVFP4QTensor.quantize(weight, block, weights_scaling_factor_2=scale)
    return quantized._quantized_data, blocks


def _nvfp4_mse(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to NVFP4. For each block, choose the E4M3 scale that makes the squared error smallest."""
    from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    (block,), most = FORMATS["nvfp4"].blocks, E2M1.largest

    def round_with(x: Tensor, amax: Tensor) -> Tensor:
        step = (amax / most)[:, None]
        codes = NVFP4QTensor._cast_fp4(x / step)
        return NVFP4QTensor.get_e2m1_values(x.device)[codes.long()] * step

    blocks = weight.reshape(-1, block)
    amax = blocks.abs().amax(dim=-1)
    calibrator = NVFP4MSECalibrator(
        amax, scale * FORMATS["nvfp4"].largest, axis=0, quant_func=round_with
    )
    calibrator.collect(blocks)
    best = calibrator.compute_amax() / (most * scale)
    scales = best.to(torch.float8_e4m3fn).reshape(*weight.shape[:-1], -1)
    quantized, _, _ = NVFP4QTensor.quantize(
        weight, block, weights_scaling_factor=scales, weights_scaling_factor_2=scale
    )
    return quantized._quantized_data, scales


def _int4(weight: Tensor, search: bool) -> tuple[Bytes, Floats]:
    """Return codes `[out, in / 2]` and scales, float32 `[out, in / block]`. The scales are exact in bfloat16.

    If `search` is true, a block's largest numbers saturate where that lowers the squared error.
    """
    from modelopt.torch.quantization.calib.mse import MseCalibrator

    block = FORMATS["int4"].block(weight.shape[-1])
    assert block is not None
    blocks = weight.reshape(-1, block)
    amax = _positive(blocks.abs().amax(dim=-1))

    def scale_of(reach: Tensor) -> Tensor:
        return (reach / FORMATS["int4"].largest).bfloat16().float()[:, None]

    def codes_of(x: Tensor, reach: Tensor) -> Tensor:
        return (x / scale_of(reach)).round_().clamp_(-8, 7)

    if search:
        calibrator = MseCalibrator(
            amax,
            axis=0,
            start_multiplier=_LEAST_REACH,
            stop_multiplier=1.0,
            quant_func=lambda x, reach: codes_of(x, reach).mul_(scale_of(reach)),
        )
        calibrator.collect(blocks)
        amax = calibrator.compute_amax().reshape(-1)
    codes = codes_of(blocks, amax).to(torch.int8).view(torch.uint8).numpy() & np.uint8(15)
    scales = scale_of(amax).numpy().reshape(*weight.shape[:-1], -1)
    return lowbits.pack(codes.reshape(weight.shape)), scales


def _int8(weight: Tensor, search: bool) -> tuple[Bytes, Floats]:
    """Return codes `[out, in]` and scales, float32 `[out]`. The scales are exact in bfloat16. `search` is ignored,
    because with 8 bits a search gains nothing."""
    amax = _positive(weight.abs().amax(dim=-1))
    scale = (amax / FORMATS["int8"].largest).bfloat16().float()
    codes = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes.view(torch.uint8).numpy(), scale.numpy()


def _least_error_fp8(weight: Tensor, amax: Tensor) -> Tensor:
    """Return the clipping bound (amax), per matrix or per row, that minimizes the squared error."""
    from modelopt.torch.quantization.calib.mse import MseCalibrator
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    axis = 0 if amax.dim() else None
    calibrator = MseCalibrator(amax, axis=axis, quant_func=fp8_eager, stop_multiplier=1.0)
    calibrator.collect(weight)
    return calibrator.compute_amax().view_as(amax)


def _round_up(scale: Tensor) -> Tensor:
    """Round a scale up to a bfloat16."""
    bits = scale.view(torch.int32)
    return (bits + 0xFFFF & ~0xFFFF).view(torch.float32)


Search = Callable[[Tensor, Tensor], Tensor]
Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
# For each format and method: a function that finds the largest magnitude to represent (None: take the weight's own),
# and a function that encodes.
_QUANTIZERS: dict[str, dict[str, tuple[Search | None, Encode]]] = {
    "fp8": {"max": (None, _fp8), "mse": (_least_error_fp8, _fp8)},
    "nvfp4": {"max": (None, _nvfp4_max), "mse": (None, _nvfp4_mse)},
}
# The encoders of weight-only formats. The second argument says whether to search for the best scales.
_WEIGHTS_ALONE = {"int4": _int4, "int8": _int8}
