"""The low-precision formats in NumPy: E4M3 (FP8), E2M1 in blocks of 16 under E4M3 scales (NVFP4), and INT4 in blocks.

All round to nearest, ties to the even code, and saturate. Bits are uint8: an E4M3 number per byte; two E2M1 or INT4
numbers per byte, the first one in the low four bits. INT4 is two's complement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from canvasrt.formats import FORMATS

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

E2M1_MAX = 6.0
BLOCK = FORMATS["nvfp4"].blocks[0]


def _e4m3_values() -> Floats:
    """Return every E4M3FN code's value: sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7F
    and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    subnormal, normal = mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, subnormal, normal) * np.where(code >> 7, -1.0, 1.0)
    value[code & 127 == 127] = np.nan
    return value.astype(np.float32)


_E4M3 = _e4m3_values()
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_INT4 = np.array([*range(8), *range(-8, 0)], np.float32)


def _pairs(values: Floats) -> Floats:
    """Return the two numbers that each byte encodes."""
    code = np.arange(256)
    return np.stack([values[code & 15], values[code >> 4]], axis=-1)


_E2M1_PAIRS, _INT4_PAIRS = _pairs(_E2M1), _pairs(_INT4)
# XOR with this turns a byte of two signed INT4 codes into unsigned ones, plus 8.
INT4_OFFSET = np.uint8(0x88)
# Midpoints of neighbouring E2M1 magnitudes. At the odd ones, the even code is the upper one.
_E2M1_MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)


def to_e4m3(x: npt.ArrayLike) -> Bytes:
    """Return E4M3 codes of `x`. Beyond ±448 it saturates; NaN stays NaN."""
    bits = np.asarray(x, np.float32).view(np.int32)
    sign, magnitude = bits >> 24 & 128, np.abs(np.asarray(x, np.float32))
    # Normal: round float32's mantissa to 3 bits, half to even, and move the exponent's bias from
    # 127 to 7.
    raw = bits & 0x7FFFFFFF
    normal = (raw + 0x7FFFF + (raw >> 20 & 1) >> 20) - (127 - 7 << 3)
    # A float32 that holds small multiples of 2⁻⁹ exactly; NaN is removed below.
    small = np.rint(np.where(magnitude < 2.0**-6, magnitude, 0) * np.float32(2.0**9))
    code = np.where(magnitude < 2.0**-6, small.astype(np.int32), np.minimum(normal, 126))
    return np.where(np.isnan(magnitude), 127, code | sign).astype(np.uint8)


def from_e4m3(bits: Bytes) -> Floats:
    """Return the values of E4M3 codes."""
    return _E4M3[bits]


def to_e2m1(x: npt.ArrayLike) -> Bytes:
    """Return E2M1 codes 0 … 15 of `x`, one per byte. Beyond ±6 it saturates."""
    values = np.asarray(x, np.float32)
    magnitude = np.abs(values)
    code = np.searchsorted(_E2M1_MIDDLES, magnitude).astype(np.uint8)
    code += np.isin(magnitude, _E2M1_MIDDLES[1::2])
    return np.where(np.signbit(values), code | 8, code).astype(np.uint8)


def from_e2m1(codes: Bytes) -> Floats:
    """Return the values of E2M1 codes, one per byte."""
    return _E2M1[codes]


def pack(codes: Bytes) -> Bytes:
    """Pack codes `[…, n]`, one per byte, into `[…, n / 2]`, two per byte."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def unpack(packed: Bytes) -> Bytes:
    """Return the inverse of `pack`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def dequantize_fp8(values: Bytes, scale: npt.ArrayLike) -> Floats:
    """Return `values` `[…, out, in]` times a scalar scale, or one scale per output `[out]`."""
    wide = np.asarray(scale, np.float32)
    return from_e4m3(values) * (wide[:, None] if wide.ndim else wide)


def dequantize_nvfp4(values: Bytes, block_scales: Bytes, scale: npt.ArrayLike) -> Floats:
    """Return `values` `[…, in / 2]` times their block's scale `[…, in / 16]` times the scalar
    global scale."""
    scales = from_e4m3(block_scales) * np.asarray(scale, np.float32)
    pairs = _E2M1_PAIRS[values].reshape(*block_scales.shape, BLOCK)
    return (pairs * scales[..., None]).reshape(*values.shape[:-1], -1)


def dequantize_int4(values: Bytes, scales: npt.NDArray[np.float32]) -> Floats:
    """Return `values` `[…, in / 2]` times their block's scale; `scales`, `[…, in / block]`, tell its length."""
    blocks = _INT4_PAIRS[values].reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).reshape(*values.shape[:-1], -1)


def dequantize(
    format: str, values: Bytes, scale: npt.ArrayLike | None, blocks: npt.NDArray[Any] | None
) -> Floats:
    """Return the values of packed codes in a format, with its `scale` and its `blocks`' scales, if it has them."""
    if format == "int4":
        assert blocks is not None
        return dequantize_int4(values, blocks)
    assert scale is not None
    if format == "int8":
        return values.view(np.int8) * np.asarray(scale, np.float32)[:, None]
    if blocks is not None:
        return dequantize_nvfp4(values, blocks, scale)
    return dequantize_fp8(values, scale)


def round_fp8(x: npt.ArrayLike, scale: float) -> Floats:
    """Return what an FP8 activation with this scale keeps of `x`."""
    wide = np.float32(scale)
    return from_e4m3(to_e4m3(np.asarray(x, np.float32) / wide)) * wide


def round_nvfp4(x: npt.ArrayLike, scale: float) -> Floats:
    """Return what an NVFP4 activation with this global scale keeps of `x` `[…, n]`, n a multiple of
    16.

    A block's scale is E4M3 of its largest magnitude over 6 and the global scale. If that is 0, so
    is the block.
    """
    values, wide = np.asarray(x, np.float32), np.float32(scale)
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scales = from_e4m3(to_e4m3(largest / np.float32(E2M1_MAX) / wide)) * wide
    codes = to_e2m1(blocks / np.where(scales > 0, scales, np.float32(1)))
    return (from_e2m1(codes) * scales).reshape(values.shape)


def from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    """Return bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Return the nearest bfloat16's bits, ties to even, for finite numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
