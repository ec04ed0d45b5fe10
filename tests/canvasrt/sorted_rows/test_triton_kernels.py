"""The kernels in Triton's interpreter, compared with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from canvasrt.formats import E2M1, E4M3
from canvasrt.graphs import lowbits
from canvasrt.pass_shapes import BLOCK_ROWS
from canvasrt.sorted_rows.description import (
    PROGRAM_OUTPUTS,
    ExpertSizes,
    KernelForm,
    inputs_per_step,
)
from canvasrt.sorted_rows.stacks import in_steps
from tests.helpers.interpreted import interpret
from tests.helpers.rounding import to_e4m3

SIZES = ExpertSizes(experts=5, top_k=3, size=96, inner=80)
Routing = Callable[[int, torch.Generator], Tensor]
NONE = torch.zeros(1)


def even(tokens: int, random: torch.Generator) -> Tensor:
    return torch.rand(tokens, SIZES.experts, generator=random).argsort(1)[:, : SIZES.top_k].int()


def same(tokens: int, random: torch.Generator) -> Tensor:
    """Give all tokens the same experts; other experts have no rows."""
    return torch.tensor([[4, 0, 2]]).repeat(tokens, 1).int()


def skewed(tokens: int, random: torch.Generator) -> Tensor:
    scores = torch.rand(tokens, SIZES.experts, generator=random) + torch.tensor([2, 0, 0.3, 0, 0.6])
    return scores.argsort(1, descending=True)[:, : SIZES.top_k].int()


class Layer:
    """One layer's routing, and its rows as the kernel sorts them."""

    def __init__(self, tokens: int, routing: Routing = even, padding: int = 0, sizes=SIZES) -> None:
        self.random = torch.Generator().manual_seed(tokens)
        self.sizes, self.tokens = sizes, tokens
        self.index = routing(tokens, self.random)
        self.positions = torch.arange(tokens)
        if padding:
            self.positions[torch.randperm(tokens, generator=self.random)[:padding]] = -1
        # Rows that are not written keep this number, which no kernel computes.
        self.order = torch.full((sizes.experts, tokens), -7, dtype=torch.int32)
        self.counts = torch.full((sizes.experts,), -7, dtype=torch.int32)
        form = KernelForm("sort_rows", sizes, "float32")
        interpret(form, (sizes.experts,), [*self._rows(self.index, self.positions), tokens])

    def _rows(self, *first: Tensor) -> list[Tensor]:
        return [*first, self.order, self.counts]

    def run(self, form: KernelForm, x: Tensor, parts: Sequence[Tensor], out: Tensor, scale: float = 1.0, capability=(8, 9)) -> None:  # fmt: skip
        """`parts`: the weights' values, then the scales of blocks and of outputs if the format has them."""
        programs = -(-form.outputs // PROGRAM_OUTPUTS)
        arguments = [x, *parts, *(3 - len(parts)) * [NONE], *self._rows(), out, self.tokens, scale]
        interpret(form, (self.sizes.blocks(self.tokens), programs), arguments, capability)

    def inner(self, dtype: torch.dtype = torch.float32) -> Tensor:
        rows = self.sizes.blocks(self.tokens) * BLOCK_ROWS
        return torch.full((rows, self.sizes.inner), 3.5).to(dtype)

    def both(self, gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        """Run both plain kernels over all rows; return `[K, T, D]`."""
        inner = self.inner(x.dtype)
        dtype = str(x.dtype).removeprefix("torch.")
        result = torch.full((self.sizes.top_k, *x.shape), -9.0).to(x.dtype)
        self.run(KernelForm("gate_up", self.sizes, dtype), x, [gate_up], inner)
        self.run(KernelForm("down", self.sizes, dtype), inner, [down], result)
        return result


def weights(random: torch.Generator, sizes: ExpertSizes = SIZES) -> tuple[Tensor, Tensor]:
    shapes = (sizes.experts, 2 * sizes.inner, sizes.size), (sizes.experts, sizes.size, sizes.inner)
    first, second = (torch.randn(s, generator=random) * s[-1] ** -0.5 for s in shapes)
    return first, second


def expected(layer: Layer, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the expected rows `[K, T, D]`. Rows of padding stay unchanged."""
    result = torch.full((SIZES.top_k, *x.shape), -9.0)
    for token in range(len(x)):
        for choice, expert in enumerate(layer.index[token].tolist()):
            if layer.positions[token] >= 0:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                result[choice, token] = down[expert] @ (F.gelu(gate, approximate="tanh") * up)
    return result


@pytest.mark.parametrize(
    ("tokens", "padding", "routing"),
    [(1, 0, even), (7, 3, same), (40, 0, skewed), (40, 25, even), (40, 25, same), (16, 16, even)],
)
def test_rows_are_sorted_by_expert_and_then_by_token(
    tokens: int, padding: int, routing: Routing
) -> None:
    layer = Layer(tokens, routing, padding)
    for expert in range(SIZES.experts):
        wanted = [
            choice * tokens + token
            for token in range(tokens)
            for choice in range(SIZES.top_k)
            if layer.index[token, choice] == expert and layer.positions[token] >= 0
        ]
        assert layer.counts[expert] == len(wanted)
        assert layer.order[expert].tolist() == wanted + [-7] * (tokens - len(wanted))


def test_more_tokens_than_the_sort_takes_at_once() -> None:
    layer = Layer(600, padding=100)
    assert layer.counts.sum() == 500 * SIZES.top_k
    for expert, count in enumerate(layer.counts.tolist()):
        held = layer.order[expert, :count] % 600
        assert (held.diff() > 0).all()


@pytest.mark.parametrize("tokens", [1, 15, 100, 256, 1000])
@pytest.mark.parametrize("routing", [even, same, skewed])
def test_no_routing_fills_more_blocks_than_are_launched(tokens: int, routing: Routing) -> None:
    loads = np.bincount(routing(tokens, torch.Generator().manual_seed(0)).flatten())
    assert (-(-loads // BLOCK_ROWS)).sum() <= SIZES.blocks(tokens)


@pytest.mark.parametrize(
    ("tokens", "padding", "routing"), [(1, 0, even), (7, 3, same), (40, 0, skewed), (40, 25, even)]
)
def test_products_are_those_of_each_token_s_experts(
    tokens: int, padding: int, routing: Routing
) -> None:
    layer = Layer(tokens, routing, padding)
    gate_up, down = weights(layer.random)
    x = torch.randn(tokens, SIZES.size, generator=layer.random)
    torch.testing.assert_close(
        layer.both(gate_up, down, x), expected(layer, x, gate_up, down), rtol=1e-5, atol=1e-5
    )


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_row_does_not_depend_on_the_others() -> None:
    """A row may be at any place in its block. The interpreter multiplies with NumPy, whose last bits depend on the
    place."""
    gate_up, down = weights(torch.Generator().manual_seed(1))
    together = Layer(40, skewed)
    x = torch.randn(40, SIZES.size, generator=together.random)
    every = together.both(gate_up, down, x)
    for token in (0, 23, 39):
        index = together.index[token : token + 1]
        alone = Layer(1, lambda tokens, random, index=index: index)
        close(alone.both(gate_up, down, x[token : token + 1])[:, 0], every[:, token])
    reversed_order = Layer(40, lambda tokens, random: together.index.flip(0).contiguous())
    close(reversed_order.both(gate_up, down, x.flip(0).contiguous()), every.flip(1))


def test_half_precision_rounds_once_per_product() -> None:
    layer = Layer(20)
    gate_up, down = (each.bfloat16() for each in weights(layer.random))
    x = torch.randn(20, SIZES.size, generator=layer.random).bfloat16()
    wanted = expected(layer, x.float(), gate_up.float(), down.float())
    torch.testing.assert_close(layer.both(gate_up, down, x).float(), wanted, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [64, 32, 16])
def test_int4_codes_and_scales(block: int, dtype: torch.dtype) -> None:
    sizes = ExpertSizes(experts=5, top_k=3, size=128, inner=64)
    layer = Layer(20, sizes=sizes)
    random = np.random.default_rng(block)
    stored = []
    for out, width in ((2 * sizes.inner, sizes.size), (sizes.size, sizes.inner)):
        codes = random.integers(0, 256, (sizes.experts, out, width // 2), np.uint8)
        scales = random.uniform(0.01, 0.03, (sizes.experts, out, width // block))
        scales = torch.from_numpy(scales.astype(np.float32)).to(dtype)
        wide = lowbits.dequantize("int4", codes, blocks=scales.float().numpy())
        stored.append((codes, scales, torch.from_numpy(wide)))
    x = torch.randn(20, sizes.size, generator=layer.random).to(dtype)
    inner, result = layer.inner(dtype), torch.zeros(sizes.top_k, 20, sizes.size, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    for function, (codes, scales, _), source, to in zip(
        ("gate_up", "down"), stored, (x, inner), (inner, result), strict=True
    ):
        form = KernelForm(function, sizes, name, "int4", None, block)
        packed = in_steps(codes, form.width, inputs_per_step(form))
        layer.run(form, source, [torch.from_numpy(packed), scales], to)
    wanted = expected(layer, x.float(), stored[0][2], stored[1][2])
    error = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.01}
    torch.testing.assert_close(result.float(), wanted, **error)


def test_fp8_codes_and_scales() -> None:
    layer = Layer(20)
    random, scales = np.random.default_rng(0), (0.02, 0.03)
    stored, wide, each = [], [], []
    for out, width in ((2 * SIZES.inner, SIZES.size), (SIZES.size, SIZES.inner)):
        codes = to_e4m3(random.standard_normal((SIZES.experts, out, width)) * 40)
        stored.append(torch.from_numpy(codes).view(torch.float8_e4m3fn))
        wide.append(torch.from_numpy(lowbits.numbers_of(E4M3, codes)))
        each.append(torch.from_numpy(random.uniform(0.001, 0.002, (SIZES.experts, out)).astype(np.float32)))  # fmt: skip
    x = torch.from_numpy(to_e4m3(random.standard_normal((20, SIZES.size)) / scales[0]))
    x = x.view(torch.float8_e4m3fn)
    inner = layer.inner(torch.float8_e4m3fn)
    result = torch.full((SIZES.top_k, 20, SIZES.size), -9.0)
    first = KernelForm("gate_up", SIZES, "float32", "fp8", "fp8")
    layer.run(first, x, [stored[0], NONE, each[0] * scales[0]], inner, scales[1])
    last = KernelForm("down", SIZES, "float32", "fp8")
    layer.run(last, inner, [stored[1], NONE, each[1] * scales[1]], result)
    for token in range(20):
        for choice, expert in enumerate(layer.index[token].tolist()):
            both = wide[0][expert] @ x[token].float() * each[0][expert] * scales[0]
            gate, up = both.chunk(2)
            states = F.gelu(gate, approximate="tanh") * up / scales[1]
            rounded = lowbits.numbers_of(E4M3, to_e4m3(states.numpy()))
            wanted = wide[1][expert] @ torch.from_numpy(rounded) * each[1][expert] * scales[1]
            # A state midway between two codes may be rounded up or down.
            torch.testing.assert_close(result[choice, token], wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))  # fmt: skip


def to_nvfp4(x: np.ndarray, whole: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize `x` `[…, n]`; return the codes, two per byte, the blocks' scales in E4M3, and the numbers they
    represent."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scales = to_e4m3(np.abs(blocks).max(-1) / 6 / whole)
    step = (lowbits.numbers_of(E4M3, scales) * np.float32(whole))[..., None]
    numbers = lowbits.values_of(E2M1)[:8]
    # Choose the nearest number; of two equally near numbers, choose the one with the even code.
    distance = np.abs(np.abs(blocks / np.where(step > 0, step, 1))[..., None] - numbers)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    codes = order[distance[..., order].argmin(-1)] | (blocks < 0) << 3
    packed = lowbits.pack(codes.reshape(x.shape).astype(np.uint8))
    return packed, scales, lowbits.dequantize("nvfp4", packed, whole, scales)


def halves_of_steps(
    random: np.random.Generator, shape: tuple[int, ...], whole: float
) -> np.ndarray:
    """Return multiples of a quarter of the step, many of them midway between two codes, in blocks whose scale is a
    power of two."""
    x = random.integers(-24, 25, shape).astype(np.float32) / 4
    x.reshape(-1, 16)[:, 0] = 6
    x.reshape(-1, 16)[::3] *= 2
    x.reshape(-1, 16)[5] = 0
    return x * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_rounded_to_nvfp4(dtype: torch.dtype) -> None:
    """Ties go to even, large numbers saturate, and nothing is written outside the rows."""
    random, whole = np.random.default_rng(0), 0.125
    x = halves_of_steps(random, (20, SIZES.size), whole)
    x[3] = random.standard_normal(SIZES.size) * 3e4  # needs more than the largest scale
    x = torch.from_numpy(x).to(dtype)
    codes, scales, _ = to_nvfp4(x.float().numpy(), whole)
    out = torch.full((20 * SIZES.size * 9 // 16 + 5,), 77, dtype=torch.uint8)
    form = KernelForm("round_rows", SIZES, str(dtype).removeprefix("torch."))
    interpret(form, (2, -(-SIZES.size // PROGRAM_OUTPUTS)), [x, out, 20, whole])
    begin = codes.size
    ours = lowbits.numbers_of(E2M1, out[:begin].numpy().reshape(codes.shape))
    # Compare numbers, not codes, since zero has two codes.
    np.testing.assert_array_equal(ours, lowbits.numbers_of(E2M1, codes))
    assert out[begin : begin + scales.size].numpy().tobytes() == scales.tobytes()
    assert (out[begin + scales.size :] == 77).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(wrong: float) -> None:
    """E2M1 has no code for NaN, so a block with a NaN or an infinity gets NaN as its scale."""
    x = torch.ones(4, SIZES.size)
    x[2, 40] = wrong
    out = torch.zeros(4 * SIZES.size * 9 // 16, dtype=torch.uint8)
    form = KernelForm("round_rows", SIZES, "float32")
    interpret(form, (1, -(-SIZES.size // PROGRAM_OUTPUTS)), [x, out, 4, 1.0])
    scales = lowbits.numbers_of(E4M3, out[4 * SIZES.size // 2 :].numpy().reshape(4, -1))
    assert np.argwhere(np.isnan(scales)).tolist() == [[2, 40 // 16]]


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
@pytest.mark.parametrize("routing", [even, skewed])
def test_nvfp4_codes_and_scales(routing: Routing, capability: tuple[int, int]) -> None:
    """The scaled product of tensor cores and the product in float16 give the same numbers."""
    layer = Layer(40, routing, padding=9)
    random, wholes = np.random.default_rng(0), (0.01, 0.02)
    parts, wide = [], []
    for (out, width), whole in zip(
        ((2 * SIZES.inner, SIZES.size), (SIZES.size, SIZES.inner)), wholes, strict=True
    ):
        weights = random.standard_normal((SIZES.experts, out, width)).astype(np.float32)
        codes, blocks, numbers = to_nvfp4(weights, 0.001)
        factor = random.uniform(0.5, 2, (SIZES.experts, out)).astype(np.float32)
        wide.append(numbers * factor[..., None])
        outputs = torch.from_numpy(factor * np.float32(0.001 * whole))
        parts.append([torch.from_numpy(codes), torch.from_numpy(blocks), outputs])
    x = random.standard_normal((40, SIZES.size)).astype(np.float32)
    codes, blocks, x = to_nvfp4(x, wholes[0])
    taken = torch.from_numpy(np.concatenate([codes.reshape(-1), blocks.reshape(-1)]))
    inner = torch.full((SIZES.blocks(40) * BLOCK_ROWS * SIZES.inner,), 255, dtype=torch.uint8)
    result = torch.full((SIZES.top_k, 40, SIZES.size), -9.0)
    first = KernelForm("gate_up", SIZES, "float32", "nvfp4", "nvfp4")
    layer.run(first, taken, parts[0], inner, wholes[1], capability)
    last = KernelForm("down", SIZES, "float32", "nvfp4")
    layer.run(last, inner, parts[1], result, 1.0, capability)
    for token in range(40):
        for choice, expert in enumerate(layer.index[token].tolist()):
            if layer.positions[token] < 0:
                assert (result[choice, token] == -9).all()
                continue
            gate, up = torch.from_numpy(wide[0][expert] @ x[token]).chunk(2)
            states = F.gelu(gate, approximate="tanh") * up
            _, _, rounded = to_nvfp4(states.numpy(), wholes[1])
            wanted = torch.from_numpy(wide[1][expert] @ rounded)
            # A state midway between two codes may be rounded up or down.
            torch.testing.assert_close(result[choice, token], wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))  # fmt: skip
