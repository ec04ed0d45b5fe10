"""The mixture of experts in standard ONNX operators: exact, and close to the cost of reading each
expert's weights once.

Tokens are gathered into `capacity` slots per expert, all experts run as one batched matrix product,
and the results are gathered back. The capacity is a dynamic dimension. A call that needs more slots
reports it through its load.
"""

from __future__ import annotations

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
        """Map `x` `[T, D]` to the chosen experts' indices and weights, both `[T, top_k]`."""
        scores = self.proj(rms_norm(x, self.eps) * self.scale * self.root)
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
        weights, index = torch.topk(probabilities, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
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
        self, x: Tensor, index: Tensor, weights: Tensor, valid: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run each token through its experts.

        Args:
            x: `[T, D]`.
            index, weights: `[T, top_k]`, from the router.
            valid: `[T]`, false for padding, which takes no slot.
            slots: `[C]`; its length is the capacity.

        Returns:
            The weighted sum `[T, D]`, and the largest number of tokens given to one expert, a 0-D
            int64. If that exceeds C, tokens were dropped and the sum is wrong.
        """
        tokens, size = x.shape
        capacity = slots.shape[0]
        place, load = expert_slots(index, valid, self.experts)
        # An extra row behind the last slot takes tokens without a slot.
        nowhere = self.experts * capacity
        row = torch.where(place < capacity, index * capacity + place, nowhere)
        source = torch.arange(tokens)[:, None].expand_as(row).reshape(-1)
        taken = torch.zeros(nowhere + 1, dtype=torch.int64).scatter(0, row.reshape(-1), source)
        batches = F.embedding(taken[:nowhere].view(self.experts, capacity), x)
        inner = gelu_gate(batches @ self.gate_up.transpose(1, 2))
        result = (inner @ self.down.transpose(1, 2)).view(nowhere, size)
        chosen = F.embedding(row.clamp(max=nowhere - 1), result)
        return (chosen * weights[:, :, None].to(x.dtype)).sum(dim=1), load


def expert_slots(index: Tensor, valid: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the place `[T, top_k]` of each token in the queues of its experts, and the longest
    queue.

    Tokens queue in order, so places are a running count of the routing mask. Padding gets a place
    beyond any capacity.
    """
    # A token's experts are distinct, so the sum over its choices is 0 or 1. (`any` has no form that
    # TensorRT supports.)
    chosen = (index[:, :, None] == torch.arange(experts)).to(torch.int32).sum(dim=1)
    queue = torch.cumsum(chosen * valid[:, None].to(torch.int32), dim=0)
    place = torch.gather(queue, 1, index).to(torch.int64) - 1
    beyond = torch.iinfo(torch.int32).max
    load = queue[-1].amax(dim=0).to(torch.int64)
    return torch.where(valid[:, None], place, beyond), load
