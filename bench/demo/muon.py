"""Muon: an optimizer for matrices, with momentum, that makes each update orthogonal (K. Jordan et al., 2024)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_ITERATIONS = 5
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """The Muon optimizer. Its parameters are matrices, or stacks of matrices with three dimensions."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = torch.stack([self._nesterov(p, p.grad) for p in parameters])
                updates = orthogonalize(updates)
                scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _nesterov(self, parameter: nn.Parameter, gradient: Any) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity = state["velocity"]
        velocity.lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(velocity, _MOMENTUM)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Push every singular value of [..., rows, columns] towards 1, by a quintic iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
