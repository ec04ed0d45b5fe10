"""Products over rows sorted by expert, in Triton the language (not the server of that name).

A row is one choice of one token. Each expert's rows fill blocks of `BLOCK`, in the order of the tokens; the last block
may be partly empty. One program computes one block's rows for some outputs, in an order of sums that depends on nothing
else, so a row's result does not depend on which other rows there are.
"""

# Tensors' types are what a kernel is compiled for.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# Forms of weights, as numbers: a kernel is compiled for one. 0 stands for floats of the activations' dtype.
_INT4, _FP8 = tl.constexpr(1), tl.constexpr(2)
_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def sort_rows(
    index, positions, order, counts, tokens, K: tl.constexpr, K2: tl.constexpr, CHUNK: tl.constexpr
):
    """List one expert's rows, and count them. Program e writes `order[e]` and `counts[e]`.

    index: int32 `[T, K]`, each token's experts, which are distinct. positions: int64 `[T]`; −1 marks padding, which
    takes no row. order: int32 `[E, T]`, choice · T + token. counts: int32 `[E]`. K2, CHUNK: powers of two.
    """
    expert = tl.program_id(0)
    choice = tl.arange(0, K2)[None, :]
    found = 0
    for first in range(0, tokens, CHUNK):
        token = first + tl.arange(0, CHUNK)
        inside = token < tokens
        valid = inside & (tl.load(positions + token, mask=inside, other=-1) >= 0)
        read = valid[:, None] & (choice < K)
        chosen = tl.load(index + token[:, None] * K + choice, mask=read, other=-1) == expert
        wanted = tl.sum(chosen.to(tl.int32), 1)
        row = tl.sum(tl.where(chosen, choice, 0), 1) * tokens + token
        place = found + tl.cumsum(wanted, 0) - wanted
        tl.store(order + expert * tokens + place, row, mask=wanted > 0)
        found += tl.sum(wanted, 0)
    tl.store(counts + expert, found)


@triton.jit
def _rows_of(block, counts, order, tokens, E: tl.constexpr, E2: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block's expert (E if the block is not in use), its rows, and which of them there are."""
    each = tl.arange(0, E2)
    count = tl.load(counts + each, mask=each < E, other=0)
    blocks = (count + BLOCK - 1) // BLOCK
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    expert = tl.minimum(expert, E)
    before = tl.sum(tl.where(each < expert, blocks, 0), 0)
    place = (block - before) * BLOCK + tl.arange(0, BLOCK)
    live = place < tl.sum(tl.where(each == expert, count, 0), 0)
    row = tl.load(order + expert * tokens + place, mask=live, other=0)
    return expert, row, live


@triton.jit
def _codes(packed, dtype: tl.constexpr):
    """Return the signed codes in the low and in the high four bits of bytes."""
    low, high = packed & 15, packed >> 4
    if dtype == tl.bfloat16:
        # Put behind the exponent of 128, a code plus 8 is 128 to 143. A conversion of integers would take four times as long.
        offset: tl.constexpr = 136.0
        low = (low.to(tl.uint16) ^ 0x4308).to(tl.bfloat16, bitcast=True) - offset
        high = (high.to(tl.uint16) ^ 0x4308).to(tl.bfloat16, bitcast=True) - offset
    else:
        low = ((low ^ 8).to(tl.int32) - 8).to(dtype)
        high = ((high ^ 8).to(tl.int32) - 8).to(dtype)
    return low.to(dtype), high.to(dtype)


@triton.jit
def _add_int4(
    total, low_x, high_x, values, scales, row, fits, first, WIDTH, UNIT, SCALED, dtype: tl.constexpr
):
    """Add the products with one unit of INT4 weights, whose low four bits hold its first half, and high ones the second."""
    half: tl.constexpr = UNIT // 2
    column = first // 2 + tl.arange(0, half)
    packed = tl.load(values + row[:, None] * (WIDTH // 2) + column, mask=fits[:, None], other=0)
    low, high = _codes(packed, dtype)
    scale = scales + row * (WIDTH // SCALED)
    one = tl.load(scale + first // SCALED, mask=fits, other=0).to(tl.float32)
    other = tl.load(scale + (first + half) // SCALED, mask=fits, other=0).to(tl.float32)
    # Codes are exact in 16 bits, and scales multiply sums in float32: nothing is rounded in between.
    total += tl.dot(low_x, tl.trans(low), input_precision="ieee") * one
    total += tl.dot(high_x, tl.trans(high), input_precision="ieee") * other
    return total


@triton.jit
def _add_wide(total, x, values, row, fits, column, WIDTH):
    """Add the products with some columns of weights that tensor cores take as they are."""
    read = fits[:, None] & (column < WIDTH)
    weight = tl.load(values + row[:, None] * WIDTH + column, mask=read, other=0.0)
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee")


@triton.jit
def _gelu(x):
    """The tanh form, in float32."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    # tanh, written so that neither end overflows to NaN.
    return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))


@triton.jit
def _store(out, x, mask, FORM: tl.constexpr, scale):
    """Write float32 numbers in the dtype of `out`; as the next product's FP8 inputs, over its scale."""
    if FORM == _FP8:
        x = tl.minimum(tl.maximum(x / scale, -_LARGEST_E4M3), _LARGEST_E4M3)
    tl.store(out, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up(
    x, values, scales, order, counts, inner, tokens, inner_scale,
    E: tl.constexpr, E2: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, UNIT: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """Compute the experts' inner states: `gelu(x · gateᵀ) * (x · upᵀ)`.

    Program (b, n) computes block b's rows and outputs n · OUT on.

    x: `[T, D]`, in E4M3 if weights are. values: the experts' `[E, 2 · F, D]`, gates first; INT4 in pairs of codes, see
    `in_steps`. scales: INT4: `[E, 2 · F, D / SCALED]`; FP8: float32 `[E, 2 · F]`, the input's included. inner: `[blocks, BLOCK,
    F]`; in E4M3 over `inner_scale` if the next product, NEXT, is FP8. UNIT: inputs per step.
    """
    expert, row, live = _rows_of(tl.program_id(0), counts, order, tokens, E, E2, BLOCK)
    if expert < E:
        dtype: tl.constexpr = x.dtype.element_ty
        output = tl.program_id(1) * OUT + tl.arange(0, OUT)
        fits = output < F
        gates = expert.to(tl.int64) * (2 * F) + output
        ups = gates + F
        source = x + (row % tokens)[:, None].to(tl.int64) * D
        gate = tl.zeros((BLOCK, OUT), tl.float32)
        up = tl.zeros((BLOCK, OUT), tl.float32)
        for first in range(0, D, UNIT):
            if FORM == _INT4:
                column = first + tl.arange(0, UNIT // 2)
                low = tl.load(source + column, mask=live[:, None], other=0.0)
                high = tl.load(source + column + UNIT // 2, mask=live[:, None], other=0.0)
                gate = _add_int4(gate, low, high, values, scales, gates, fits, first, D, UNIT, SCALED, dtype)  # fmt: skip
                up = _add_int4(up, low, high, values, scales, ups, fits, first, D, UNIT, SCALED, dtype)  # fmt: skip
            else:
                column = first + tl.arange(0, UNIT)
                part = tl.load(source + column, mask=live[:, None] & (column < D), other=0.0)
                gate = _add_wide(gate, part, values, gates, fits, column, D)
                up = _add_wide(up, part, values, ups, fits, column, D)
        if FORM == _FP8:
            gate *= tl.load(scales + gates, mask=fits, other=0)
            up *= tl.load(scales + ups, mask=fits, other=0)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        to = inner + place[:, None] * F + output
        _store(to, _gelu(gate) * up, live[:, None] & fits, NEXT, inner_scale)


@triton.jit
def down(
    inner, values, scales, order, counts, rows, tokens, unused,
    E: tl.constexpr, E2: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, UNIT: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """Compute the experts' results `inner · downᵀ`, and put each row in its place.

    As `gate_up`, but: values: `[E, D, F]`. rows: `[K, T, D]`, choices first; those of padding are not written.
    """
    block = tl.program_id(0)
    expert, row, live = _rows_of(block, counts, order, tokens, E, E2, BLOCK)
    if expert < E:
        dtype: tl.constexpr = inner.dtype.element_ty
        output = tl.program_id(1) * OUT + tl.arange(0, OUT)
        fits = output < D
        outs = expert.to(tl.int64) * D + output
        place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        source = inner + place[:, None] * F
        total = tl.zeros((BLOCK, OUT), tl.float32)
        for first in range(0, F, UNIT):
            if FORM == _INT4:
                column = first + tl.arange(0, UNIT // 2)
                low = tl.load(source + column, mask=live[:, None], other=0.0)
                high = tl.load(source + column + UNIT // 2, mask=live[:, None], other=0.0)
                total = _add_int4(total, low, high, values, scales, outs, fits, first, F, UNIT, SCALED, dtype)  # fmt: skip
            else:
                column = first + tl.arange(0, UNIT)
                part = tl.load(source + column, mask=live[:, None] & (column < F), other=0.0)
                total = _add_wide(total, part, values, outs, fits, column, F)
        if FORM == _FP8:
            total *= tl.load(scales + outs, mask=fits, other=0)
        to = rows + row[:, None].to(tl.int64) * D + output
        _store(to, total, live[:, None] & fits, NEXT, unused)
