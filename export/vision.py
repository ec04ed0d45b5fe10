"""The vision tower and its projection into the language model, as one graph that maps patches to soft tokens.

Follows `transformers.models.gemma4.modeling_gemma4.Gemma4VisionModel` and
`DiffusionGemmaMultimodalEmbedder`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.export.layers import (
    Linear,
    RMSNorm,
    fused_attention,
    halves,
    placeholder,
    rms_norm,
    rotate,
)


class ClippedLinear(nn.Module):
    """A projection. Its input and output are clamped to the checkpoint's ranges, if there are any."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, size: int, out: int, clipped: bool) -> None:
        super().__init__()
        self.linear = Linear(size, out)
        self.clipped = clipped
        if clipped:
            for name in ("input_min", "input_max", "output_min", "output_max"):
                self.register_parameter(name, placeholder(1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.clipped:
            return self.linear(x)
        x = torch.clamp(x, self.input_min, self.input_max)
        out = self.linear(x)
        return torch.clamp(out, self.output_min, self.output_max)


class VisionLayer(nn.Module):
    """Bidirectional attention with two-dimensional RoPE, then a gated MLP. Norms precede and follow both."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        size, inner, eps = (
            vision["hidden_size"],
            vision["intermediate_size"],
            vision["rms_norm_eps"],
        )
        self.heads, self.kv_heads = vision["num_attention_heads"], vision["num_key_value_heads"]
        self.head_dim, self.eps = vision["head_dim"], eps
        clipped = bool(vision.get("use_clipped_linears"))
        self.q_proj = ClippedLinear(size, self.heads * self.head_dim, clipped)
        self.k_proj = ClippedLinear(size, self.kv_heads * self.head_dim, clipped)
        self.v_proj = ClippedLinear(size, self.kv_heads * self.head_dim, clipped)
        self.o_proj = ClippedLinear(self.heads * self.head_dim, size, clipped)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps), RMSNorm(self.head_dim, eps)
        self.gate_proj = ClippedLinear(size, inner, clipped)
        self.up_proj = ClippedLinear(size, inner, clipped)
        self.down_proj = ClippedLinear(inner, size, clipped)
        self.input_norm, self.post_attention_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_mlp_norm, self.post_mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Map `x` `[N, P, size]` to the same shape; `mask` `[N, 1, 1, P]` is additive."""
        batch, patches, _ = x.shape
        normed = self.input_norm(x)
        shape = (batch, patches, -1, self.head_dim)
        query = rotate_plane(self.q_norm(self.q_proj(normed).view(shape)), *turn).transpose(1, 2)
        key = rotate_plane(self.k_norm(self.k_proj(normed).view(shape)), *turn).transpose(1, 2)
        value = rms_norm(self.v_proj(normed).view(shape), self.eps).transpose(1, 2)
        out = fused_attention(query, key, value, mask.expand(-1, -1, patches, -1))
        x = x + self.post_attention_norm(
            self.o_proj(out.transpose(1, 2).reshape(batch, patches, -1))
        )
        normed = self.pre_mlp_norm(x)
        gated = F.gelu(self.gate_proj(normed), approximate="tanh") * self.up_proj(normed)
        return x + self.post_mlp_norm(self.down_proj(gated))


class Vision(nn.Module):
    """Vision tower, pooling of neighbouring patches, and projection to the language model's width."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vision is not None
        vision = config.vision
        size = vision["hidden_size"]
        self.eps = vision["rms_norm_eps"]
        self.pool = vision["pooling_kernel_size"]
        self.root = size**0.5
        self.input_proj = Linear(3 * vision["patch_size"] ** 2, size)
        self.positions = placeholder(2, vision["position_embedding_size"], size)
        self.layers = nn.ModuleList(VisionLayer(vision) for _ in range(vision["num_hidden_layers"]))
        self.standardize = bool(vision.get("standardize"))
        if self.standardize:
            self.std_bias, self.std_scale = placeholder(size), placeholder(size)
        self.projection = Linear(size, config.hidden_size)
        half = vision["head_dim"] // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        theta = vision["rope_parameters"]["rope_theta"]
        self.register_buffer("frequencies", theta**-exponents)

    def forward(self, pixel_values: Tensor, pixel_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the soft tokens of images that are cut into patches.

        Args:
            pixel_values: `[N, P, 3 · patch²]` float32 in [0, 1], as from transformers' image processor.
            pixel_positions: `[N, P, 2]` int64, (x, y) of each patch, (−1, −1) for padding. P is a
                multiple of pool².

        Returns:
            features `[N, T, D]` where T = P / pool², and valid `[N, T]` bool, false where a soft token is padding.
        """
        empty = (pixel_positions[..., 0] == -1) & (pixel_positions[..., 1] == -1)
        places = pixel_positions.clamp(min=0)
        across, down = (F.embedding(places[..., axis], self.positions[axis]) for axis in (0, 1))
        x = self.input_proj(2 * (pixel_values - 0.5))
        x = x + torch.where(empty[..., None], 0.0, across + down)
        turn = plane_rotation(pixel_positions, self.frequencies)
        mask = torch.where(empty, torch.finfo(x.dtype).min / 2, 0.0).to(x.dtype)[:, None, None]
        for layer in self.layers:
            x = layer(x, turn, mask)
        x = torch.where(empty[..., None], 0.0, x)
        pooled, valid = average_pool(x, places, self.pool)
        pooled = pooled * self.root
        if self.standardize:
            pooled = (pooled - self.std_bias) * self.std_scale
        return self.projection(rms_norm(pooled.to(x.dtype), self.eps)), valid


def plane_rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotations by x and by y, `[N, P, 1, 2, head_dim / 2]`, at `positions` `[N, P,
    2]`."""
    angles = positions[..., None].to(torch.float32) * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def rotate_plane(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[N, P, heads, head_dim]`: its first half by the patch's x coordinate, its second half by the y
    coordinate."""
    across, down = halves(x)
    return torch.cat(
        [
            rotate(across, cos[..., 0, :], sin[..., 0, :]),
            rotate(down, cos[..., 1, :], sin[..., 1, :]),
        ],
        dim=-1,
    )


def average_pool(x: Tensor, places: Tensor, pool: int) -> tuple[Tensor, Tensor]:
    """Average squares of `pool` × `pool` patches.

    Returns the averages `[N, P / pool², size]`, and bool `[N, P / pool²]`, true for squares that are not empty. As in
    the reference, padding belongs to the first square. It only adds zeros there, and that square is never empty.
    """
    patches = x.shape[1]
    count = patches // (pool * pool)
    width = (places[..., 0].amax(dim=-1, keepdim=True) + 1) // pool
    square = places[..., 0] // pool + width * (places[..., 1] // pool)
    inside = (square[..., None] == torch.arange(count)).to(torch.float32)
    pooled = (inside / (pool * pool)).transpose(1, 2) @ x.to(torch.float32)
    return pooled, inside.amax(dim=1) > 0
