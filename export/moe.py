"""The mixture of experts in standard ONNX operators: exact, and close to the cost of reading each
expert's weights once.

Tokens are gathered into `capacity` slots per expert, all experts run as one batched matrix product,
and the results are gathered back. The capacity is a dynamic dimension. A call that needs more slots
reports it through its load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.export.layers import Linear, gelu_gate, placeholder, rms_norm


class Router(nn.Module):
    """Scores every expert for every token and keeps the best `top_k_experts`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.top_k = config.top_k_experts
        self.root = config.hidden_size**-0.5
        self.proj = Linear(config.hidden_size, config.num_experts)
        self.scale = placeholder(config.hidden_size)
        self.per_expert_scale = placeholder(config.num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[T, D]` → the chosen experts' indices and weights, both `[T, top_k]`."""
        scores = self.proj(rms_norm(x, self.eps) * self.scale * self.root).to(torch.float32)
        # Probabilities over all experts, renormalised over the best: the same as a softmax over the best alone.
        best, index = torch.topk(scores, self.top_k, dim=-1)
        weights = torch.softmax(best, dim=-1)
        scales = F.embedding(index, self.per_expert_scale[:, None]).squeeze(-1)
        return index, weights * scales


class Experts(nn.Module):
    """Gated MLPs, one per expert, as batched weights in the checkpoint's `[E, out, in]` layout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.experts = experts
        self.gate_up = placeholder(experts, 2 * inner, size)
        self.down = placeholder(experts, size, inner)

    def forward(
        self, x: Tensor, index: Tensor, weights: Tensor, valid: Tensor, slots: Slots
    ) -> tuple[Tensor, Tensor]:
        """Run each token through its experts.

        Args: `x` `[T, D]`; `index`, `weights` `[T, top_k]`; `valid` `[T]` false for padding, which takes no slot;
        `slots` how many rows the two products take, and of which queues.
        Returns: the weighted sum `[T, D]`, and the largest number of tokens that one expert was given, a 0-D int64.
        With a load above a number of slots, tokens past them were dropped and the sum is wrong.
        """
        queue = queues(index, valid, self.experts)
        # The first product: a row for each token in the queues that feed it.
        both = F.embedding(waiting(queue[:, slots.gate_queues], slots.gate), x)
        both = both @ self.gate_up.transpose(1, 2)
        # Its result for the tokens in each expert's own queue.
        token = waiting(queue[:, : self.experts], slots.down)
        own = torch.arange(self.experts)[:, None]
        place = queue[token, slots.gate_queues[:, None]].to(torch.int64) - 1
        inner = gelu_gate(taken(both, own, place))
        result = inner @ self.down.transpose(1, 2)
        chosen = taken(result, index, torch.gather(queue, 1, index).to(torch.int64) - 1)
        mixed = (chosen * weights[:, :, None].to(x.dtype)).sum(dim=1)
        return mixed, queue[-1, : self.experts].amax(dim=0).to(torch.int64)


@dataclass(frozen=True)
class Slots:
    """How the experts' products are filled.

    gate_queues: int64, the queue that feeds each expert's gate and up projections: `[E]` its own, or `[1]` the queue of
        all tokens, number E, for every expert.
    gate, down: int64 `[S]` and `[C]`, 0 … : their lengths are the rows that gate and up, and down, take of a queue.
    """

    gate_queues: Tensor
    gate: Tensor
    down: Tensor


def taken(rows: Tensor, expert: Tensor, place: Tensor) -> Tensor:
    """Rows of `[E, S, n]` by expert and place; some row, which nothing reads, where there is no such place."""
    experts, places, size = rows.shape
    number = (expert * places + place).clamp(min=0, max=experts * places - 1)
    return F.embedding(number, rows.view(experts * places, size))


def waiting(queue: Tensor, slots: Tensor) -> Tensor:
    """Return the token `[Q, C]` in each slot of queues `[T, Q]`; an empty slot holds the last token, which nothing reads.

    It is the first token whose queue is longer than the slot's number: as many come before it as have no longer one.
    """
    before = (queue[:, :, None] <= slots.to(torch.int32)).sum(dim=0, dtype=torch.int32)
    return before.clamp(max=queue.shape[0] - 1).to(torch.int64)


def queues(index: Tensor, valid: Tensor, experts: int) -> Tensor:
    """Return how many tokens up to and with each one wait for each expert, int32 `[T, E + 1]`; padding waits for none.

    A token's place in the queue of an expert that it chose is one less. The last queue is that of all tokens.
    """
    # A token's experts are distinct, so the sum over its choices is 0 or 1. (`any` has no form that TensorRT takes.)
    given = torch.where(valid[:, None], index, -1)
    given = torch.cat([given, torch.full_like(index[:, :1], experts)], dim=1)
    chosen = (given[:, :, None] == torch.arange(experts + 1)).sum(dim=1, dtype=torch.int32)
    return torch.cumsum(chosen, dim=0, dtype=torch.int32)
