"""Packed numbers in NumPy: codes of few bits with scales, and bfloat16.

Codes are stored as uint8: one 8-bit code per byte, or two 4-bit codes, the first of them in the low four bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from canvasrt.formats import FORMATS, Codes

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# XOR with this adds 8 to each of the two signed INT4 codes in a byte, so they become unsigned.
INT4_OFFSET = np.uint8(0x88)


@cache
def values_of(codes: Codes) -> Floats:
    """Return the value of every code. A float's code is a sign, an exponent plus the usual bias, and a mantissa."""
    count = 1 << codes.bits
    code = np.arange(count)
    if codes.mantissa is None:
        return np.where(code < count // 2, code, code - count).astype(np.float32)
    bias = (1 << codes.bits - 2 - codes.mantissa) - 1
    size = code & count // 2 - 1
    exponent, mantissa = (
        size >> codes.mantissa,
        size % (1 << codes.mantissa) / (1 << codes.mantissa),
    )
    subnormal, normal = mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias)
    value = np.where(exponent == 0, subnormal, normal) * np.where(code < count // 2, 1.0, -1.0)
    if codes.has_nan:
        value[size == count // 2 - 1] = np.nan
    return value.astype(np.float32)


@cache
def _pairs_of(codes: Codes) -> npt.NDArray[np.uint64]:
    """Return the pair of numbers that each byte encodes, `[256]`. Looking up pairs is seven times as fast as looking up
    single numbers."""
    byte = np.arange(256)
    pairs = np.stack([values_of(codes)[byte & 15], values_of(codes)[byte >> 4]], axis=-1)
    return pairs.view(np.uint64)[:, 0]


def numbers_of(codes: Codes, packed: Bytes) -> Floats:
    """Return the numbers `[…, n]` that `packed` `[…, n × bits / 8]` encodes."""
    if codes.bits == 8:
        return values_of(codes)[packed]
    return _pairs_of(codes)[packed].view(np.float32)


def pack(codes: Bytes) -> Bytes:
    """Pack 4-bit codes `[…, n]`, one per byte, into `[…, n / 2]`, two per byte."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def dequantize(
    format: str,
    values: Bytes,
    scale: npt.ArrayLike | None = None,
    blocks: npt.NDArray[Any] | None = None,
) -> Floats:
    """Return the numbers `[…, out, in]` of a matrix that is stored in a format.

    Args:
        values: the matrix's codes, packed.
        scale: a scalar, or one number per output `[out]` if there are no blocks; None if only blocks have scales.
        blocks: the blocks' scales `[…, out, in / block]`; they are codes if the format stores scales as codes.
    """
    row = FORMATS[format]
    return scaled(numbers_of(row.codes, values), scale, blocks, row.block_scales)


def scaled(
    wide: Floats,
    scale: npt.ArrayLike | None,
    blocks: npt.NDArray[Any] | None,
    block_scales: Codes | None,
) -> Floats:
    """Return decoded numbers times their scales. If `block_scales` is not None, `blocks` has codes in that encoding
    instead of floats."""
    whole = None if scale is None else np.asarray(scale, np.float32)
    if blocks is None:
        assert whole is not None
        return wide * (whole[:, None] if whole.ndim else whole)
    scales = blocks if block_scales is None else numbers_of(block_scales, blocks)
    if whole is not None:
        scales = scales * whole
    return (wide.reshape(*scales.shape, -1) * scales[..., None]).reshape(wide.shape)


def from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    """Return the numbers that bfloat16 bits encode, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers; ties go to even. All numbers must be finite."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
