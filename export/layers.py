"""The parts of a transformer layer, written so that torch.onnx can export them: norm, RoPE, attention, MLP.

Every module follows `transformers.models.diffusion_gemma.modeling_diffusion_gemma`, the reference for tests. Weights
have the checkpoint's `[out, in]` layout, and are stacked if they project the same input. Modules only contain
placeholders for weights, so a network of any size can be traced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.defaults import FOLDED_HEADS, MAX_FUSED_HEAD_DIM


def placeholder(*shape: int) -> nn.Parameter:
    """Return a weight of this shape that takes no memory until `onnx.write_graph` stores the real one."""
    return nn.Parameter(torch.zeros(1).expand(*shape), requires_grad=False)


class Linear(nn.Module):
    """`x @ weightᵀ`, without bias."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.weight = placeholder(out, size)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last axis: `x / sqrt(mean(x²) + eps) * weight`, computed in float32."""
    size = x.shape[-1]
    return F.rms_norm(
        x, (size,), torch.ones(size, dtype=x.dtype) if weight is None else weight, eps
    )


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of the last axis. (In ONNX, `chunk` becomes a sequence, which TensorRT does not
    support.)"""
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def gelu_gate(gate_up: Tensor) -> Tensor:
    """Return `gelu_tanh(gate) * up`. `gate_up` `[..., 2·inner]` contains gate, then up."""
    gate, up = halves(gate_up)
    return F.gelu(gate, approximate="tanh") * up


class RMSNorm(nn.Module):
    """RMS norm over the last axis, followed by multiplication by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = placeholder(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight)


class GatedMLP(nn.Module):
    """`down(gelu_tanh(gate(x)) * up(x))`, where one weight `[2·inner, size]` stacks gate and up."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * inner)
        self.down = Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu_gate(self.gate_up(x)))


def inverse_frequencies(layer: Layer) -> Tensor:
    """Return RoPE frequencies `[head_dim / 2]` in float32.

    Sliding layers rotate every pair. Full layers are `proportional`: only the first pairs, a fraction
    `rope_partial` of all, rotate. Their frequencies are spaced as if all pairs rotated
    (`modeling_rope_utils._compute_proportional_rope_parameters`).
    """
    half = layer.head_dim // 2
    turning = int(layer.rope_partial * layer.head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32) / layer.head_dim
    return torch.cat(
        [layer.rope_theta**-exponents, torch.zeros(half - turning, dtype=torch.float32)]
    )


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return RoPE's cosine and sine at `positions` `[B, L]`, float32 `[B, 1, L, head_dim]`."""
    angles = positions[:, :, None].to(torch.float32) * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `x` `[B, heads, L, head_dim]`. As in GPT-NeoX, a pair consists of one number from each half of the
    head."""
    first, second = halves(x)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


def attention_mask(
    positions: Tensor,
    groups: Tensor,
    causal: Tensor,
    past_positions: Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the additive mask `[B, 1, L, past + L]`: 0 where a query attends to a key, else a large negative number.

    A clean token (`causal[b]`) attends to keys up to its own position; in a sliding layer, only to the last `window` of
    them. It also attends to all tokens of its own image. A canvas token attends to all keys, even in a sliding layer.
    No token attends to empty keys, which have position −1. The references are `create_masks_for_generate` and
    `create_diffusion_decoder_attention_mask` with a dynamic cache.
    """
    key_positions = torch.cat([past_positions, positions], dim=1)[:, None, :]
    key_groups = torch.cat([torch.full_like(past_positions, -1), groups], dim=1)[:, None, :]
    queries = positions[:, :, None]
    seen = key_positions <= queries
    if window is not None:
        seen = seen & (queries - key_positions < window)
    seen = seen | ((groups[:, :, None] == key_groups) & (key_groups >= 0))
    seen = (seen | ~causal[:, None, None]) & (key_positions >= 0)
    # Half the dtype's lowest number, so that adding a score cannot overflow.
    hidden = torch.finfo(dtype).min / 2
    return torch.where(seen, 0.0, hidden).to(dtype)[:, None]


class Attention(nn.Module):
    """Grouped-query attention of one layer, for clean tokens and canvases. Scores are not scaled."""

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.eps = config.rms_norm_eps
        # A full layer has no value projection. Its values are its keys before norm and RoPE.
        self.shares_kv = layer.kind == "full"
        kv_projections = 1 if self.shares_kv else 2
        self.projected = self.heads + kv_projections * layer.num_kv_heads
        self.qkv = Linear(config.hidden_size, self.projected * layer.head_dim)
        self.o = Linear(self.heads * layer.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(layer.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(layer.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor,
        past_key: Tensor,
        past_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map `x` `[1, B·L, D]` to the attention's output `[1, B·L, D]`. Also return this call's keys and values `[B,
        kv_heads, L, head_dim]`."""
        batch, _, length, _ = mask.shape
        kv_heads, size = self.layer.num_kv_heads, self.layer.head_dim
        # Normalize queries, keys and values together: norms are per head, and only their weights differ.
        states = self.qkv(x).view(batch, length, self.projected, size)
        states = rms_norm(states, self.eps).transpose(1, 2)
        keys = states[:, self.heads : self.heads + kv_heads]
        query = rotate(states[:, : self.heads] * self.q_norm.weight, *turn)
        key = rotate(keys * self.k_norm.weight, *turn)
        value = keys if self.shares_kv else states[:, self.heads + kv_heads :]
        if size <= MAX_FUSED_HEAD_DIM:
            keys, values = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
            out = fused_attention(query, keys, values, mask)
        else:
            past = past_key.shape[2]
            masks = mask[..., :past].to(torch.float32), mask[..., past:].to(torch.float32)
            out = folded_attention(query, (past_key, key), (past_value, value), masks)
        out = out.transpose(1, 2).reshape(1, batch * length, self.heads * size)
        return self.o(out), key, value


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend with queries `[B, heads, L, d]` to keys `[B, kv_heads, K, d]`, without scaling scores. In ONNX, this
    becomes one node, `Attention`."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=1.0, enable_gqa=grouped)


def folded_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], masks: Sequence[Tensor]
) -> Tensor:
    """Attention in primitive operators. Cached and new keys are not joined, because that would copy the whole cache.

    Each side (cached keys or new keys) gets its own softmax in float32, and the two results are merged. All heads that
    share keys are rows of one product, so keys are not repeated for every head. Only a few of these heads are processed
    at a time, because the scores of all heads over a long context would take gigabytes.
    """
    batch, heads, length, size = query.shape
    kv_heads = keys[0].shape[1]
    grouped = query.view(batch, kv_heads, heads // kv_heads, length, size)
    # Always zero, since no mask is positive. Builders do not know this, so they keep the addition of `zero` below.
    zero = (masks[-1][:, :, 0, 0, None, None, None] > 0).to(query.dtype)
    parts: list[Tensor] = []
    for first in range(0, heads // kv_heads, FOLDED_HEADS):
        part = grouped[:, :, first : first + FOLDED_HEADS]
        count = part.shape[2]
        if parts:
            # Adding this zero makes this part depend on the previous one. Otherwise TensorRT would compute all scores
            # at the same time.
            part = part + parts[-1][:, :, :1, :1, :1] * zero
        # All sizes are given: for a −1, TensorRT would reserve memory for the product of all dynamic sizes.
        rows = part.reshape(batch, kv_heads, count * length, size)
        sides = [side(rows, *each, count) for each in zip(keys, values, masks, strict=True)]
        out = under_one_softmax(sides).to(query.dtype)
        parts.append(out.view(batch, kv_heads, count, length, size))
    return torch.cat(parts, dim=2).view(batch, heads, length, size)


def side(
    rows: Tensor, key: Tensor, value: Tensor, mask: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unnormalised attention of `rows` `[B, kv_heads, count·L, d]` over one side's keys.

    `mask` is `[B, 1, L, K]`. Returns the largest score and the sum of exponentials, both float32 `[B, kv_heads,
    count·L, 1]`, and the weighted sum of values.
    """
    batch, kv_heads, total, _ = rows.shape
    keys = key.shape[2]
    scores = (rows @ key.transpose(2, 3)).view(batch, kv_heads, count, total // count, keys)
    scores = scores.to(torch.float32) + mask[:, :, None]
    largest = scores.amax(dim=-1, keepdim=True)
    mass = (scores - largest).exp()
    out = mass.to(rows.dtype).view(batch, kv_heads, total, keys) @ value
    summed = mass.sum(dim=-1, keepdim=True)
    return largest.view(batch, kv_heads, total, 1), summed.view(batch, kv_heads, total, 1), out


def under_one_softmax(sides: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Merge both sides in float32. The result equals one softmax over all keys."""
    (first, first_sum, first_out), (second, second_sum, second_out) = sides
    largest = torch.maximum(first, second)
    one, other = (first - largest).exp(), (second - largest).exp()
    out = first_out.to(torch.float32) * one + second_out.to(torch.float32) * other
    return out / (first_sum * one + second_sum * other)
