"""The denoising step on the host, for a canvas that was told which tokens may stand where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from canvasrt.runtime.host_head import HostHead


@dataclass(frozen=True)
class Step:
    """What one step made of a canvas. Arrays are `[canvas]`, hidden states `[canvas, hidden_size]`."""

    canvas: np.ndarray  # int64, renoised
    argmax: np.ndarray  # int64
    entropy: np.ndarray  # float32, nats
    accepted: np.ndarray  # bool
    next_hidden: np.ndarray  # float32


def told_step(
    head: HostHead,
    hidden: np.ndarray,
    allowed: Mapping[int, np.ndarray],
    temperature: np.float32,
    entropy_bound: float,
    uniforms: np.ndarray,
    noise: np.ndarray,
) -> Step:
    """Run one step of the sampler, as the exported head does, over the tokens that are allowed.

    Args:
        hidden: the last layer's output, float32 `[canvas, hidden_size]`.
        allowed: the tokens of each restricted position, int64 `[k]`; one token pins it. Others may
            have any token.
        uniforms: float32 `[canvas]` in [0, 1).
        noise: int64 `[canvas]`, the fresh token of each position that is not accepted. A pinned
            position keeps its token.
    """
    length, size = hidden.shape
    argmax, drawn = np.empty(length, np.int64), np.empty(length, np.int64)
    entropy, soft = np.zeros(length, np.float32), np.empty((length, size), np.float32)
    noise = noise.copy()
    free = np.array([i for i in range(length) if i not in allowed], np.int64)
    if free.size:
        logits = head.logits(hidden[free]) / temperature
        best, chosen, spread, mass = _draw(logits, uniforms[free])
        argmax[free], drawn[free], entropy[free] = best, chosen, spread
        soft[free] = head.mean_embedding(mass)
    pins = np.array([i for i, tokens in allowed.items() if len(tokens) == 1], np.int64)
    if pins.size:
        tokens = np.array([allowed[int(i)][0] for i in pins], np.int64)
        argmax[pins], drawn[pins], noise[pins] = tokens, tokens, tokens
        soft[pins] = head.embed(tokens)
    for position, tokens in allowed.items():
        if len(tokens) > 1:
            here = slice(position, position + 1)
            logits = head.logits(hidden[here], tokens) / temperature
            best, chosen, spread, mass = _draw(logits, uniforms[here])
            argmax[here], drawn[here], entropy[here] = tokens[best], tokens[chosen], spread
            soft[here] = head.mean_embedding(mass, tokens)
    accepted = accept(entropy, entropy_bound)
    canvas = np.where(accepted, drawn, noise)
    return Step(canvas, argmax, entropy, accepted, head.next_hidden(canvas, soft))


def accept(entropy: np.ndarray, bound: float) -> np.ndarray:
    """Return the positions to keep, bool `[canvas]`: those whose more certain ones have entropies
    that sum to at most `bound` (`EntropyBoundSampler.accept_canvas`)."""
    order = np.argsort(entropy, kind="stable")
    ordered = entropy[order]
    kept = np.zeros(len(entropy), bool)
    kept[order] = np.cumsum(ordered, dtype=np.float32) - ordered <= np.float32(bound)
    return kept


def _draw(
    logits: np.ndarray, uniforms: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return argmax, draw by inverse CDF, entropy (each `[n]`) and probabilities `[n, k]`."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    mass = np.exp(shifted)
    total = mass.sum(axis=-1, keepdims=True)
    entropy = (np.log(total) - (mass * shifted).sum(axis=-1, keepdims=True) / total)[:, 0]
    sums = np.cumsum(mass, axis=-1, dtype=np.float64)
    target = np.minimum(uniforms[:, None] * sums[:, -1:], sums[:, -1:] * (1 - 2**-23))
    return logits.argmax(axis=-1), (sums <= target).sum(axis=-1), entropy, mass / total
