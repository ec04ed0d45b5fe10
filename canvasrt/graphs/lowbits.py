"""Packed numbers in NumPy: codes of few bits under scales, and bfloat16.

Bits are uint8: an 8-bit code per byte, or two 4-bit codes, the first one in the low four bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from canvasrt.formats import FORMATS, Codes

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# XOR with this turns a byte of two signed INT4 codes into unsigned ones, plus 8.
INT4_OFFSET = np.uint8(0x88)


@cache
def values_of(codes: Codes) -> Floats:
    """Return the value of every code. Floats have a sign, an exponent with the usual bias, and a mantissa."""
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
    """Return the pairs of numbers that a byte encodes, `[256]`: one lookup per pair takes a seventh of the time."""
    byte = np.arange(256)
    pairs = np.stack([values_of(codes)[byte & 15], values_of(codes)[byte >> 4]], axis=-1)
    return pairs.view(np.uint64)[:, 0]


def numbers_of(codes: Codes, packed: Bytes) -> Floats:
    """Return the numbers `[…, n]` of `packed` `[…, n × bits / 8]`."""
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
    """Return the numbers of a matrix in a format, `[…, out, in]`.

    Args:
        values: its codes, packed.
        scale: a scalar, or without blocks one per output `[out]`; None if the format has only blocks' scales.
        blocks: the blocks' scales `[…, out, in / block]`, as codes if the format stores them so.
    """
    row = FORMATS[format]
    return scaled(numbers_of(row.codes, values), scale, blocks, row.block_scales)


def scaled(
    wide: Floats,
    scale: npt.ArrayLike | None,
    blocks: npt.NDArray[Any] | None,
    block_scales: Codes | None,
) -> Floats:
    """Return decoded numbers times their scales; `block_scales` are the codes of `blocks`, None for floats."""
    whole = None if scale is None else np.asarray(scale, np.float32)
    if blocks is None:
        assert whole is not None
        return wide * (whole[:, None] if whole.ndim else whole)
    scales = blocks if block_scales is None else numbers_of(block_scales, blocks)
    if whole is not None:
        scales = scales * whole
    return (wide.reshape(*scales.shape, -1) * scales[..., None]).reshape(wide.shape)


def from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    """Return bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Return the nearest bfloat16's bits, ties to even, for finite numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
