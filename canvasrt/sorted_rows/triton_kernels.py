"""Products over rows sorted by expert, in the Triton language (not Triton the server).

A row holds one token for one of the experts that it is routed to. An expert's rows fill blocks of `BLOCK` rows, in
token order; the last block may be partly empty. A program computes some outputs for one block's rows, and always adds
in the same order. So a row's result does not depend on other rows.
"""

# Arguments have no annotations, because kernels are compiled separately for each type.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# The numbers of weight formats in `FORMS`; a kernel is compiled for one of them. 0 means unquantized weights.
_INT4, _FP8, _NVFP4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LARGEST_E4M3, _LARGEST_E2M1 = tl.constexpr(448.0), tl.constexpr(6.0)
# How many numbers share a scale in NVFP4.
_SHARED = tl.constexpr(16)
_E2M1 = tl.constexpr("e2m1")


@triton.jit
def sort_rows(
    index, positions, order, counts, tokens, K: tl.constexpr, K2: tl.constexpr, CHUNK: tl.constexpr
):
    """List and count one expert's rows. Program e writes `order[e]` and `counts[e]`.

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
    """Return a block's expert (E if the block is unused), its rows, and a mask of the rows that exist."""
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
        # The XOR puts `code + 8` into the low bits of 128 in bfloat16. This gives the numbers 128 to 143. Converting
        # integers would take four times as long.
        offset: tl.constexpr = 136.0
        low = (low.to(tl.uint16) ^ 0x4308).to(tl.bfloat16, bitcast=True) - offset
        high = (high.to(tl.uint16) ^ 0x4308).to(tl.bfloat16, bitcast=True) - offset
    else:
        low = ((low ^ 8).to(tl.int32) - 8).to(dtype)
        high = ((high ^ 8).to(tl.int32) - 8).to(dtype)
    return low.to(dtype), high.to(dtype)


@triton.jit
def _add_int4(
    total, low_x, high_x, values, blocks, row, fits, first, WIDTH, UNIT: tl.constexpr, SCALED: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Add the inputs' products with one unit of INT4 weights to `total`. The unit's first half is in the low four bits
    of its bytes, and its second half in the high four bits."""
    half: tl.constexpr = UNIT // 2
    column = first // 2 + tl.arange(0, half)
    packed = tl.load(values + row[:, None] * (WIDTH // 2) + column, mask=fits[:, None], other=0)
    low, high = _codes(packed, dtype)
    scale = blocks + row * (WIDTH // SCALED)
    one = tl.load(scale + first // SCALED, mask=fits, other=0).to(tl.float32)
    # Often, both halves are in the same block, and have the same scale.
    other = one
    if SCALED % UNIT != 0:
        other = tl.load(scale + (first + half) // SCALED, mask=fits, other=0).to(tl.float32)
    # Codes are exact in 16 bits, and scales multiply sums in float32: nothing is rounded in between.
    total += tl.dot(low_x, tl.trans(low), input_precision="ieee") * one
    total += tl.dot(high_x, tl.trans(high), input_precision="ieee") * other
    return total


@triton.jit
def _add_wide(total, x, values, row, fits, column, WIDTH):
    """Add the products of `x` and some columns of weights to `total`. The weights need no conversion."""
    read = fits[:, None] & (column < WIDTH)
    weight = tl.load(values + row[:, None] * WIDTH + column, mask=read, other=0.0)
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee")


@triton.jit
def _shared_scales(blocks, row, fits, block, WIDTH):
    """Return the scales of some blocks of NVFP4 rows, in E4M3."""
    read = fits[:, None] & (block < WIDTH // _SHARED)
    bits = tl.load(blocks + row[:, None] * (WIDTH // _SHARED) + block, mask=read, other=0)
    return bits.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _e2m1(code):
    """Return the numbers that E2M1 codes 0 … 15 encode, in float16. Sign, exponent and mantissa move to where float16
    has them; the exponent is then too small by 14."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.float16, bitcast=True) * tl.full((1, 1), 16384.0, tl.float16)


@triton.jit
def _nvfp4(codes, blocks, row, fits, column, WIDTH):
    """Return the numbers in the low and in the high four bits of bytes, times their blocks' scales. This is exact in
    float16."""
    scale = _shared_scales(blocks, row, fits, column // (_SHARED // 2), WIDTH).to(tl.float16)
    wide = codes.to(tl.uint16)
    return _e2m1(wide & 15) * scale, _e2m1(wide >> 4) * scale


@triton.jit
def _codes_of(x, row, live, first, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """Load some NVFP4 rows' codes for one unit, two per byte."""
    column = first // 2 + tl.arange(0, UNIT // 2)
    read = live[:, None] & (column < WIDTH // 2)
    return tl.load(x + row[:, None] * (WIDTH // 2) + column, mask=read, other=0)


@triton.jit
def _add_nvfp4(
    total, x, x_blocks, x_row, live, values, blocks, row, fits, first, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Add the products of `x` and one unit of NVFP4 weights, two per byte, to `total`. Scales of whole tensors are
    applied later.

    x: the rows' codes for the unit. If tensor cores do not multiply NVFP4, codes and scales become float16.
    """
    column = first // 2 + tl.arange(0, UNIT // 2)
    read = fits[:, None] & (column < WIDTH // 2)
    codes = tl.load(values + row[:, None] * (WIDTH // 2) + column, mask=read, other=0)
    if NATIVE:
        block = first // _SHARED + tl.arange(0, UNIT // _SHARED)
        mine = _shared_scales(x_blocks, x_row, live, block, WIDTH)
        theirs = _shared_scales(blocks, row, fits, block, WIDTH)
        total = tl.dot_scaled(x, mine, _E2M1, tl.trans(codes), theirs, _E2M1, total)
    else:
        low_x, high_x = _nvfp4(x, x_blocks, x_row, live, column, WIDTH)
        low, high = _nvfp4(codes, blocks, row, fits, column, WIDTH)
        total = tl.dot(low_x, tl.trans(low), total, input_precision="ieee")
        total = tl.dot(high_x, tl.trans(high), total, input_precision="ieee")
    return total


@triton.jit
def _to_nvfp4(x, whole, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Round float32 `[ROWS, WIDTH]` to NVFP4; `whole` is the scale of the whole tensor.

    Returns codes, two per byte, `[ROWS, WIDTH / 2]`, and the bits of the blocks' scales, `[ROWS, WIDTH / 16]`. A block
    that contains NaN or infinity gets NaN as its scale. Divisions round correctly, unlike Triton's `/`.
    """
    parts = tl.reshape(x, (ROWS, WIDTH // _SHARED, _SHARED))
    # E2M1 has no NaN, and a maximum ignores NaN. So add zero times each number, which is NaN for NaN and infinity.
    largest = tl.max(tl.abs(parts), 2) + tl.sum(parts * 0.0, 2)
    share = tl.div_rn(tl.div_rn(largest, _LARGEST_E2M1), whole)
    scale = tl.minimum(share, _LARGEST_E4M3, tl.PropagateNan.ALL).to(tl.float8e4nv)
    step = scale.to(tl.float32) * whole
    size = tl.div_rn(tl.abs(parts), tl.where(step > 0, step, 1.0)[:, :, None])
    # Find the codes of the nearest numbers; ties go to even codes.
    code = (size > 0.25).to(tl.uint8) + (size >= 0.75).to(tl.uint8) + (size > 1.25).to(tl.uint8)
    code += (size >= 1.75).to(tl.uint8) + (size > 2.5).to(tl.uint8)
    code += (size >= 3.5).to(tl.uint8) + (size > 5.0).to(tl.uint8)
    code |= (parts < 0).to(tl.uint8) << 3
    low, high = tl.split(tl.reshape(code, (ROWS, WIDTH // 2, 2)))
    return low | (high << 4), scale.to(tl.uint8, bitcast=True)


@triton.jit
def _store_nvfp4(
    to, rows, row, live, first, x, whole, ROWS: tl.constexpr, UNIT: tl.constexpr, WIDTH
):
    """Write some columns of some rows in NVFP4. In the buffer, the codes of all `rows` rows precede all scales."""
    codes, scales = _to_nvfp4(x, whole, ROWS, UNIT)
    row = row[:, None].to(tl.int64)
    column = first // 2 + tl.arange(0, UNIT // 2)
    tl.store(to + row * (WIDTH // 2) + column, codes, mask=live[:, None] & (column < WIDTH // 2))
    block = first // _SHARED + tl.arange(0, UNIT // _SHARED)
    there = to + rows.to(tl.int64) * (WIDTH // 2) + row * (WIDTH // _SHARED)
    tl.store(there + block, scales, mask=live[:, None] & (block < WIDTH // _SHARED))


@triton.jit
def round_rows(x, codes, tokens, scale, D: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr):
    """Round `x` `[T, D]` to NVFP4; `scale` is the scale of all of `x`. Program (b, n) rounds BLOCK rows from row b ·
    BLOCK, and of these, OUT columns from column n · OUT.

    codes: two per byte, `[T, D / 2]`, followed by the blocks' scales in E4M3, `[T, D / 16]`.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * OUT
    column = first + tl.arange(0, OUT)
    live = row < tokens
    source = x + row[:, None].to(tl.int64) * D + column
    part = tl.load(source, mask=live[:, None] & (column < D), other=0.0).to(tl.float32)
    _store_nvfp4(codes, tokens, row, live, first, part, scale, BLOCK, OUT, D)


@triton.jit
def _gelu(x):
    """Return GELU in its tanh form, in float32."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    # A form of tanh that does not overflow to NaN at either end.
    return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))


@triton.jit
def _store(out, x, mask, FORM: tl.constexpr, scale):
    """Write float32 numbers in the dtype of `out`. For FP8, first divide by `scale`, the next product's input scale."""
    if FORM == _FP8:
        x = tl.maximum(tl.div_rn(x, scale), -_LARGEST_E4M3, tl.PropagateNan.ALL)
        x = tl.minimum(x, _LARGEST_E4M3, tl.PropagateNan.ALL)
    tl.store(out, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_up(
    x, values, blocks, scales, order, counts, inner, tokens, inner_scale,
    E: tl.constexpr, E2: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, UNIT: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, NEXT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute the experts' inner states: `gelu(x · gateᵀ) * (x · upᵀ)`.

    Program (b, n) computes OUT outputs from output n · OUT, for the rows of block b.

    x: `[T, D]`, in E4M3 if the weights are in FP8; for NVFP4, what `round_rows` writes.
    values: weights `[E, 2 · F, D]`, gates first. A byte has two INT4 codes as in `in_steps`, or two adjacent NVFP4
    codes.
    blocks: scales of the weights' blocks. INT4: `[E, 2 · F, D / SCALED]`. NVFP4: bits of E4M3, `[E, 2 · F, D / 16]`.
    scales: for FP8 and NVFP4, the weights' scales times the input's scale, float32 `[E, 2 · F]`.
    inner: the result `[blocks, BLOCK, F]`, in NEXT, the next product's format: for FP8, rounded with `inner_scale`; for
    NVFP4, rounded as by `round_rows`.
    UNIT: inputs per step. NATIVE: whether tensor cores multiply NVFP4.
    """
    expert, row, live = _rows_of(tl.program_id(0), counts, order, tokens, E, E2, BLOCK)
    if expert < E:
        dtype: tl.constexpr = x.dtype.element_ty
        output = tl.program_id(1) * OUT + tl.arange(0, OUT)
        fits = output < F
        gates = expert.to(tl.int64) * (2 * F) + output
        ups = gates + F
        token = (row % tokens).to(tl.int64)
        source = x + token[:, None] * D
        gate = tl.zeros((BLOCK, OUT), tl.float32)
        up = tl.zeros((BLOCK, OUT), tl.float32)
        for first in range(0, D, UNIT):
            if FORM == _INT4:
                column = first + tl.arange(0, UNIT // 2)
                low = tl.load(source + column, mask=live[:, None], other=0.0)
                high = tl.load(source + column + UNIT // 2, mask=live[:, None], other=0.0)
                gate = _add_int4(gate, low, high, values, blocks, gates, fits, first, D, UNIT, SCALED, dtype)  # fmt: skip
                up = _add_int4(up, low, high, values, blocks, ups, fits, first, D, UNIT, SCALED, dtype)  # fmt: skip
            elif FORM == _NVFP4:
                part = _codes_of(x, token, live, first, D, UNIT)
                x_blocks = x + tokens.to(tl.int64) * (D // 2)
                gate = _add_nvfp4(gate, part, x_blocks, token, live, values, blocks, gates, fits, first, D, UNIT, NATIVE)  # fmt: skip
                up = _add_nvfp4(up, part, x_blocks, token, live, values, blocks, ups, fits, first, D, UNIT, NATIVE)  # fmt: skip
            else:
                column = first + tl.arange(0, UNIT)
                part = tl.load(source + column, mask=live[:, None] & (column < D), other=0.0)
                gate = _add_wide(gate, part, values, gates, fits, column, D)
                up = _add_wide(up, part, values, ups, fits, column, D)
        if FORM >= _FP8:  # FP8 and NVFP4
            gate *= tl.load(scales + gates, mask=fits, other=0)
            up *= tl.load(scales + ups, mask=fits, other=0)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        states = _gelu(gate) * up
        if NEXT == _NVFP4:
            rows, begin = tl.num_programs(0) * BLOCK, tl.program_id(1) * OUT
            _store_nvfp4(inner, rows, place, live, begin, states, inner_scale, BLOCK, OUT, F)
        else:
            to = inner + place[:, None] * F + output
            _store(to, states, live[:, None] & fits, NEXT, inner_scale)


@triton.jit
def down(
    inner, values, blocks, scales, order, counts, rows, tokens, unused,
    E: tl.constexpr, E2: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, UNIT: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, NEXT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute the experts' results `inner · downᵀ`, and put each row in its place.

    Arguments are as in `gate_up`, except: values: `[E, D, F]`. rows: the result `[K, T, D]`; rows of padding tokens are
    not written.
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
                total = _add_int4(total, low, high, values, blocks, outs, fits, first, F, UNIT, SCALED, dtype)  # fmt: skip
            elif FORM == _NVFP4:
                part = _codes_of(inner, place, live, first, F, UNIT)
                inner_blocks = inner + tl.num_programs(0).to(tl.int64) * (BLOCK * F // 2)
                total = _add_nvfp4(total, part, inner_blocks, place, live, values, blocks, outs, fits, first, F, UNIT, NATIVE)  # fmt: skip
            else:
                column = first + tl.arange(0, UNIT)
                part = tl.load(source + column, mask=live[:, None] & (column < F), other=0.0)
                total = _add_wide(total, part, values, outs, fits, column, F)
        if FORM >= _FP8:  # FP8 and NVFP4
            total *= tl.load(scales + outs, mask=fits, other=0)
        to = rows + row[:, None].to(tl.int64) * D + output
        _store(to, total, live[:, None] & fits, NEXT, unused)
