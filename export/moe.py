"""The mixture of experts in standard ONNX operators. It is exact, and hardly slower than reading all experts' weights
once.

Tokens are gathered into `capacity` slots per expert, all experts run as one batched matrix product, and results are
gathered back. Alternatively, every expert's first matrix product (gate and up) takes all tokens; the second (down)
takes only the tokens routed to that expert. The capacity is a dynamic dimension. The output `load` shows whether it was
too small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.export.layers import Linear, gelu_gate, placeholder


class Router(nn.Module):
    """Scores the experts for every token and selects the best `top_k_experts`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k_experts
        self.root = config.hidden_size**-0.5
        self.proj = Linear(config.hidden_size, config.num_experts)
        self.scale = placeholder(config.hidden_size)
        self.per_expert_scale = placeholder(config.num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map normalised `x` `[1, T, D]` to the chosen experts' indices and weights, both `[T, top_k]`."""
        scores = self.proj(x * self.scale * self.root).squeeze(0).to(torch.float32)
        # A softmax over only the best scores equals a softmax over all scores, renormalised over the best. `topk` sorts
        # them, so the first is the largest.
        best, index = torch.topk(scores, self.top_k, dim=-1)
        shares = torch.exp(best - best[:, :1])
        weights = shares / sum_of_halves(shares, -1)
        scales = F.embedding(index, self.per_expert_scale[:, None]).squeeze(-1)
        return index, weights * scales


class Experts(nn.Module):
    """One gated MLP per expert. The experts' weights are batched in the checkpoint's layout, `[E, out, in]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.experts = experts
        self.gate_up = placeholder(experts, 2 * inner, size)
        self.down = placeholder(experts, size, inner)

    def forward(
        self, x: Tensor, index: Tensor, weights: Tensor, valid: Tensor, slots: Slots
    ) -> tuple[Tensor, Tensor]:
        """Run every token through its experts.

        Args:
            x: `[T, D]`.
            index, weights: `[T, top_k]`.
            valid: `[T]`, false for padding, which gets no slot.
            slots: selects the rows of both products; see `Slots`.
        Returns:
            the weighted sum `[1, T, D]`, and the load: the number of tokens per expert, int32 `[1, E]`. If a load
            exceeds the number of slots, tokens were dropped and the sum is wrong.
        """
        queue = queues(index, valid, self.experts)
        # The first product has one row per slot, filled from the queues that `gate_queues` selects.
        gate_queue = queue.index_select(1, slots.gate_queues)
        both = F.embedding(tokens_in_slots(gate_queue, slots.gate), x)
        both = both @ self.gate_up.transpose(1, 2)
        # From the first product's result, every expert takes the rows of the tokens in its own queue.
        token = tokens_in_slots(queue[:, : self.experts], slots.down)
        own = torch.arange(self.experts)[:, None]
        cell = token * (self.experts + 1) + slots.gate_queues[:, None]
        place = F.embedding(cell, queue.view(-1, 1)).squeeze(-1).to(torch.int64) - 1
        inner = gelu_gate(gather_rows(both, own, place))
        result = inner @ self.down.transpose(1, 2)
        place = torch.gather(queue, 1, index).to(torch.int64) - 1
        # A token's experts are the first axis of `chosen`, so the sum needs no reshape. A reshape would prevent fusion.
        chosen = gather_rows(result, index.t(), place.t())
        mixed = sum_of_halves(chosen * weights.t()[:, :, None].to(x.dtype), 0)
        return mixed, queue[-1:, : self.experts]


def sum_of_halves(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension, and keep it with size 1.

    TensorRT-RTX fuses sums over four elements with surrounding operators, but not sums over eight.
    """
    half = x.shape[dim] // 2
    if not half:
        return x
    first, rest = x.narrow(dim, 0, half), x.narrow(dim, half, x.shape[dim] - half)
    return first.sum(dim=dim, keepdim=True) + rest.sum(dim=dim, keepdim=True)


@dataclass(frozen=True)
class Slots:
    """Selects the tokens in the experts' products.

    gate_queues: int64, the queues that feed the gate and up product: `[E]` if every expert has its own queue; or `[1]`,
    the number E, if the queue of all tokens feeds every expert.
    gate: int64 `[S]`, the slot numbers 0 … S − 1. Every expert has S rows in the gate and up product.
    down: int64 `[C]`, the slot numbers 0 … C − 1. Every expert has C rows in the down product.
    """

    gate_queues: Tensor
    gate: Tensor
    down: Tensor


def gather_rows(rows: Tensor, expert: Tensor, place: Tensor) -> Tensor:
    """Gather rows of `[E, S, n]` by expert and place. If a place is out of range, the row is arbitrary and not used."""
    experts, places, size = rows.shape
    number = (expert * places + place).clamp(min=0, max=experts * places - 1)
    return F.embedding(number, rows.view(experts * places, size))


def tokens_in_slots(queue: Tensor, slots: Tensor) -> Tensor:
    """Return the index of the token in every slot, `[Q, C]`, from the running counts `[T, Q]`.

    Slot c has the first token at which the count exceeds c. The index of this token is the number of counts that are at
    most c. Empty slots get the last token, and their results are not used.
    """
    before = (queue[:, :, None] <= slots.to(torch.int32)).sum(dim=0, dtype=torch.int32)
    return before.clamp(max=queue.shape[0] - 1).to(torch.int64)


def queues(index: Tensor, valid: Tensor, experts: int) -> Tensor:
    """Return the experts' queues as running counts, int32 `[T, E + 1]`: how many of the tokens 0 … t are in each queue.

    Padding is in no expert's queue, but the last column counts all tokens, including padding. A token's place in a
    queue is its count minus 1.
    """
    # A token's experts differ from each other, so this sum is 0 or 1. (TensorRT does not support `any`.)
    given = torch.where(valid[:, None], index, -1)
    given = torch.cat([given, torch.full_like(index[:, :1], experts)], dim=1)
    chosen = (given[:, :, None] == torch.arange(experts + 1)).sum(dim=1, dtype=torch.int32)
    return torch.cumsum(chosen, dim=0, dtype=torch.int32)
