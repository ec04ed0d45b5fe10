"""Computes experts in NumPy, to check our kernels' results on the GPU that will run the kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from canvasrt.formats import E2M1, E4M3, FORMATS
from canvasrt.graphs import lowbits
from canvasrt.graphs.lowbits import Bytes, Floats
from canvasrt.sorted_rows.description import (
    ROUNDED,
    STACK_PARTS,
    ExpertStack,
    KernelForm,
    SortedLayer,
    SortedSegment,
    inputs_per_step,
)

# Half of the tokens have the same experts, so the rows of these experts fill more than a block.
TRIAL_TOKENS = 32
# The largest accepted deviation of an expert's rows, relative to their norm. Rounding to 16 bits causes less than 0.01;
# a kernel that mixes up rows, codes or scales exceeds 0.1.
TOLERATED = 0.05


def rounded(x: Floats, form: KernelForm, scale: float) -> Floats:
    """Return inputs as a product takes them: divided by `scale` and rounded to the product's format, or only rounded to
    the activations' dtype if the product's inputs are not quantized."""
    if form.format not in ROUNDED:
        return x.astype(np.dtype(form.dtype)).astype(np.float32)
    scaled = x / np.float32(scale)
    if form.format == "fp8":
        clipped = np.clip(scaled, -E4M3.largest, E4M3.largest)
        return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    blocks = scaled.reshape(-1, FORMATS["nvfp4"].blocks[0])
    share = np.minimum(np.abs(blocks).max(1, keepdims=True) / E2M1.largest, E4M3.largest)
    scales = share.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = (blocks / np.where(scales > 0, scales, 1)).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float32) * scales).reshape(x.shape)


def matrix(form: KernelForm, values: Bytes, blocks: Bytes, scales: Bytes) -> Floats:
    """Return one expert's matrix `[out, in]` from the bytes of its parts. A part that the format lacks is empty."""
    if form.format is None:
        return values.view(form.dtype).reshape(-1, form.width).astype(np.float32)
    row = FORMATS[form.format]
    if form.format == "int4":  # the inverse of `in_steps`
        halves = values.reshape(-1, 1, inputs_per_step(form) // 2)
        values = lowbits.pack(np.concatenate([halves & 15, halves >> 4], axis=1).reshape(-1))
    wide = lowbits.numbers_of(row.codes, values.reshape(-1, form.width * row.bits // 8))
    if blocks.size:
        stored = blocks if row.block_scales else blocks.view(form.dtype).astype(np.float32)
        wide = lowbits.scaled(wide, None, stored.reshape(len(wide), -1), row.block_scales)
    return wide * scales.view(np.float32)[:, None] if scales.size else wide


def results(x: Floats, gate_up: Floats, down: Floats, form: KernelForm, scale: float) -> Floats:
    """Return an expert's results for some rows. `form` describes the second product; `scale` is its inputs' scale."""
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    tanh = np.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3))
    return rounded(0.5 * gate * (1 + tanh) * up, form, scale) @ down.T


class Trial:
    """A test of a layer's kernels on random inputs: the tokens `x`, and each token's experts, `index`."""

    def __init__(self, segment: SortedSegment, layer: SortedLayer, weights: Bytes) -> None:
        """`weights`: the bytes of the segment's file of weights."""
        self._layer, self._weights, sizes = layer, weights, segment.sizes
        self._gate_up, self._down = (
            KernelForm.named(each.kernel, sizes, segment.dtype)
            for each in (layer.gate_up, layer.down)
        )
        random = np.random.default_rng(0)
        order = np.argsort(random.random((TRIAL_TOKENS, sizes.experts)))
        self.index = np.ascontiguousarray(order[:, : sizes.top_k], np.int32)
        self.index[TRIAL_TOKENS // 2 :] = self.index[0]
        first = self._gate_up
        spread = 100 * layer.input_scale if first.format in ROUNDED else 1.0
        x = spread * random.standard_normal((TRIAL_TOKENS, sizes.size), np.float32)
        self.x = x.astype(np.dtype(segment.dtype))
        self._taken = rounded(self.x.astype(np.float32), first, layer.input_scale)
        if first.format == "fp8":  # the engine before the experts rounds to FP8
            self.x = self._taken.astype(ml_dtypes.float8_e4m3fn)

    def error(self, found: np.ndarray) -> float:
        """Return the larger of two experts' deviations. The first expert has many rows, the second may have few.

        found: the kernels' results `[K, T, D]`.
        """
        errors = []
        for expert in (self.index[0, 0], self.index[1, 0]):
            token, choice = np.nonzero(self.index == expert)
            gate_up = self._matrix(self._gate_up, self._layer.gate_up, expert)
            down = self._matrix(self._down, self._layer.down, expert)
            scale = self._layer.inner_scale
            wanted = results(self._taken[token], gate_up, down, self._down, scale)
            norm = np.linalg.norm(wanted) or 1.0
            errors.append(np.linalg.norm(found[choice, token].astype(np.float32) - wanted) / norm)
        return float(np.max(errors))  # NaN if any error is NaN

    def _matrix(self, form: KernelForm, stack: ExpertStack, expert: int) -> Floats:
        spans = (getattr(stack, part) for part in STACK_PARTS)
        parts = (
            self._weights[begin : begin + size].reshape(form.sizes.experts, -1)[expert]
            for begin, size in spans
        )
        return matrix(form, *parts)
