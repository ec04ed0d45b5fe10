"""The last graph of a denoising step: maps hidden states to the next canvas and its first hidden states.

It projects to the vocabulary, applies softcap and temperature, draws tokens, accepts those within the entropy bound,
replaces the others by noise, and embeds the canvas, including self-conditioning. So no vocabulary-sized tensor is an
output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.export.layers import GatedMLP, RMSNorm, placeholder, rms_norm


class Head(nn.Module):
    """Final norm, tied output projection, sampler, and the embedding of the sampled canvas."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.softcap = config.logit_softcap
        self.embed_scale = size**0.5
        self.grid = vocabulary_grid(config.vocab_size)
        self.table = placeholder(config.vocab_size, size)
        self.norm = RMSNorm(size, eps)
        self.signal_norm = RMSNorm(size, eps)
        self.signal_mlp = GatedMLP(size, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        temperature: Tensor,
        entropy_bound: Tensor,
        uniforms: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Run one sampler step for every row of the batch.

        Args:
            hidden: `[B, L, D]` from the last body segment.
            temperature, entropy_bound: `[B]` float32; the bound is in nats.
            uniforms: `[B, L]` float32 in [0, 1), one draw per position.
            noise: `[B, L]` int64, the tokens for positions whose drawn token is not accepted.

        Returns:
            canvas `[B, L]` int64, the next canvas; argmax `[B, L]` int64, the likeliest tokens; entropy `[B, L]`
            float32, in nats; accepted `[B, L]` bool, true where the canvas keeps the drawn token; next_hidden `[B, L,
            D]`, the first body segment's next input.
        """
        raw = self.project(self.norm(hidden))
        # Softcap and temperature do not change which logit is largest.
        argmax = raw.argmax(dim=-1)
        logits = self.capped(raw) / temperature[:, None, None]
        shifted = logits - logits.amax(dim=-1, keepdim=True)
        mass = shifted.exp()
        total = mass.sum(dim=-1)
        # H = log Z − Σ (m / Z) log m, which needs no normalised log-probabilities.
        entropy = total.log() - (mass * shifted).sum(dim=-1) / total
        accepted = accept(entropy, entropy_bound)
        # Apart from the logits, only this vocabulary-sized tensor stays in memory.
        kept = mass.to(hidden.dtype)
        canvas = torch.where(accepted, draw(kept, uniforms, self.grid), noise)
        soft = self.mix(kept).to(torch.float32) / total[..., None]
        soft = soft.to(hidden.dtype) * self.embed_scale
        signal = self.signal_mlp(self.signal_norm(soft))
        embedded = self.embed(canvas) * self.embed_scale
        return canvas, argmax, entropy, accepted, rms_norm(embedded + signal, self.eps)

    def project(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to logits `[..., V]`."""
        return x @ self.table.t()

    def mix(self, mass: Tensor) -> Tensor:
        """Return the weighted sum of the table's rows, `[..., D]`. `mass` `[..., V]` contains the weights."""
        return mass @ self.table

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the table's rows."""
        return F.embedding(tokens, self.table)

    def capped(self, raw: Tensor) -> Tensor:
        """Return logits `[B, L, V]` in float32, soft-capped: `cap · tanh(raw / cap)`."""
        return torch.tanh(raw.to(torch.float32) / self.softcap) * self.softcap


def vocabulary_grid(size: int) -> tuple[int, int]:
    """Return the two factors of the vocabulary's size that are closest to each other, the smaller one first (262,144 =
    512 × 512)."""
    rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return rows, size // rows


def draw(mass: Tensor, uniforms: Tensor, grid: tuple[int, int]) -> Tensor:
    """Draw one token per position, `[B, L]`, by inverse CDF: the first token whose cumulative mass exceeds `uniforms` ×
    total mass.

    `mass` `[B, L, V]`, of any dtype, need not be normalised; it is summed in float32. The vocabulary is divided into
    rows. A cumulative sum over the rows' totals selects a row, and a cumulative sum inside this row selects the token,
    so no cumulative sum runs over the whole vocabulary.
    """
    rows, columns = grid
    batch, length, _ = mass.shape
    cells = mass.view(batch, length, rows, columns)
    below = cells.to(torch.float32).sum(dim=-1).cumsum(dim=-1)
    target = uniforms[..., None] * below[..., -1:]
    row = (below <= target).sum(dim=-1, keepdim=True).clamp(max=rows - 1)
    before = torch.where(row > 0, below.gather(-1, (row - 1).clamp(min=0)), 0.0)
    number = torch.arange(batch * length).view(batch, length) * rows + row.squeeze(-1)
    chosen = F.embedding(number, mass.view(batch * length * rows, columns))
    inside = chosen.to(torch.float32).cumsum(dim=-1)
    # If rounding moves the target beyond the row's own sum, take the last token that has any mass.
    rest = torch.minimum(target - before, inside[..., -1:] * (1 - 2**-23))
    column = (inside <= rest).sum(dim=-1, keepdim=True)
    return (row * columns + column).squeeze(-1)


def accept(entropy: Tensor, bound: Tensor) -> Tensor:
    """Return the accepted positions, bool `[B, L]`.

    A position is accepted if the entropies of all more certain positions sum to at most `bound` `[B]`
    (`EntropyBoundSampler.accept_canvas`). So the most certain position is always accepted. `runtime/host_sampler.py`
    applies the same rule if a request restricts the tokens.
    """
    ordered, order = torch.topk(entropy, entropy.shape[-1], dim=-1, largest=False, sorted=True)
    kept = ordered.cumsum(dim=-1) - ordered <= bound[:, None]
    # TensorRT scatters integers, not booleans.
    marks = kept.to(torch.int32)
    return torch.zeros_like(marks).scatter(-1, order, marks).to(torch.bool)
