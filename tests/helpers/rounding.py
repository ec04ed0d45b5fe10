"""Rounding to FP8 and NVFP4 in NumPy: to nearest, ties to the even code, saturating."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from ml_dtypes import float4_e2m1fn, float8_e4m3fn

from canvasrt.formats import E2M1, E4M3
from canvasrt.graphs import lowbits
from canvasrt.graphs.lowbits import Bytes, Floats

BLOCK = 16


def to_e4m3(x: npt.ArrayLike) -> Bytes:
    """Return E4M3 codes of `x`. Numbers beyond ±448 saturate; NaN stays NaN."""
    return np.clip(np.asarray(x, np.float32), -448, 448).astype(float8_e4m3fn).view(np.uint8)


def from_e4m3(bits: Bytes) -> Floats:
    """Return the values of E4M3 codes."""
    return lowbits.numbers_of(E4M3, bits)


def to_e2m1(x: npt.ArrayLike) -> Bytes:
    """Return E2M1 codes 0 … 15 of `x`, one per byte. Numbers beyond ±6 saturate."""
    return np.clip(np.asarray(x, np.float32), -6, 6).astype(float4_e2m1fn).view(np.uint8)


def from_e2m1(codes: Bytes) -> Floats:
    """Return the values of E2M1 codes, one per byte."""
    return lowbits.values_of(E2M1)[codes]


def round_fp8(x: npt.ArrayLike, scale: float) -> Floats:
    """Round `x` as an FP8 activation with this scale."""
    wide = np.float32(scale)
    return from_e4m3(to_e4m3(np.asarray(x, np.float32) / wide)) * wide


def round_nvfp4(x: npt.ArrayLike, scale: float) -> Floats:
    """Round `x`, `[…, n]` with n a multiple of 16, as an NVFP4 activation with this global scale.

    The scale of a block is its largest magnitude, divided by 6 and by the global scale, in E4M3. If the scale is 0, the
    block becomes 0.
    """
    values, wide = np.asarray(x, np.float32), np.float32(scale)
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scales = from_e4m3(to_e4m3(largest / np.float32(E2M1.largest) / wide)) * wide
    codes = to_e2m1(blocks / np.where(scales > 0, scales, np.float32(1)))
    return (from_e2m1(codes) * scales).reshape(values.shape)
