"""The last graph of a denoising step: maps hidden states to the next canvas and its first hidden states.

It contains projection to the vocabulary, softcap, temperature, the draw, entropy-bound acceptance, renoising, embedding
and self-conditioning. So no vocabulary-sized tensor is an output.
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
            noise: `[B, L]` int64, the new tokens of positions that are not accepted.

        Returns:
            canvas `[B, L]` int64, the next canvas; argmax `[B, L]` int64, the likeliest tokens; entropy `[B, L]` float32
            in nats; accepted `[B, L]` bool, true where the canvas keeps the drawn token; next_hidden `[B, L, D]`, the
            first body segment's next input.
        """
        raw = self.project(self.norm(hidden))
        # Softcap and temperature do not change the order.
        argmax = raw.argmax(dim=-1)
        logits = self.capped(raw) / temperature[:, None, None]
        shifted = logits - logits.amax(dim=-1, keepdim=True)
        mass = shifted.exp()
        total = mass.sum(dim=-1)
        # H = log Z − Σ (m / Z) log m, which needs no normalised log-probabilities.
        entropy = total.log() - (mass * shifted).sum(dim=-1) / total
        accepted = accept(entropy, entropy_bound)
        # In addition to the logits, this is the only vocabulary-sized value that is kept.
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
        """Return the sum of the table's rows weighted by `mass` `[..., V]`, `[..., D]`."""
        return mass @ self.table

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the table's rows."""
        return F.embedding(tokens, self.table)

    def capped(self, raw: Tensor) -> Tensor:
        """Return logits `[B, L, V]` in float32, soft-capped: `cap · tanh(raw / cap)`."""
        return torch.tanh(raw.to(torch.float32) / self.softcap) * self.softcap


def vocabulary_grid(size: int) -> tuple[int, int]:
    """Return the two factors of the vocabulary's size that are closest to its square root, the smaller first (262,144 =
    512 × 512)."""
    rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return rows, size // rows


def draw(mass: Tensor, uniforms: Tensor, grid: tuple[int, int]) -> Tensor:
    """Draw one token `[B, L]` per position by inverse CDF: the first whose cumulative mass exceeds
    u times the total.

    `mass` `[B, L, V]`, of any dtype, need not be normalised; it is summed in float32. The sum runs over rows of the vocabulary first, and
    then inside the row that holds the target, so no running sum is as long as the vocabulary.
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
    # Rounding may move the target beyond the row's own sum. Then take the last token with any mass.
    rest = torch.minimum(target - before, inside[..., -1:] * (1 - 2**-23))
    column = (inside <= rest).sum(dim=-1, keepdim=True)
    return (row * columns + column).squeeze(-1)


def accept(entropy: Tensor, bound: Tensor) -> Tensor:
    """Return the accepted positions, bool `[B, L]`.

    A position is accepted if the entropies of all more certain positions sum to at most `bound` `[B]`
    (`EntropyBoundSampler.accept_canvas`). The most certain position has none before it, so it is always accepted.
    `runtime/host_sampler.py` has the same rule for answers under conditions.
    """
    ordered, order = torch.topk(entropy, entropy.shape[-1], dim=-1, largest=False, sorted=True)
    kept = ordered.cumsum(dim=-1) - ordered <= bound[:, None]
    # TensorRT scatters integers, not booleans.
    marks = kept.to(torch.int32)
    return torch.zeros_like(marks).scatter(-1, order, marks).to(torch.bool)
