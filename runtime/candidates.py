"""What a caller changes about the distribution: `logit_bias`, and `top_k`, `top_p` and `min_p` of the
draw."""

from __future__ import annotations

import numpy as np

from canvasrt.runtime.sampling_params import SamplingParams


def biased(
    logits: np.ndarray, params: SamplingParams, tokens: np.ndarray | None = None
) -> np.ndarray:
    """Add the bias to raw logits `[n, k]` of `tokens` int64 `[k]`, ascending, or of all; in place."""
    if params.logit_bias:
        ids, values = (np.array(each) for each in zip(*params.logit_bias, strict=True))
        if tokens is not None:
            held = np.isin(ids, tokens)
            ids, values = np.searchsorted(tokens, ids[held]), values[held]
        logits[:, ids] += values.astype(np.float32)
    return logits


def candidates(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return which tokens may be drawn, bool `[n, k]`, from logits `[n, k]` after the temperature.

    `top_k` counts first, then `top_p` and then `min_p`, each over what the one before left: as
    `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper` of transformers do.
    """
    kept = np.ones(logits.shape, bool)
    if 0 < params.top_k < logits.shape[1]:
        kept = (
            logits >= -np.partition(-logits, params.top_k - 1)[:, params.top_k - 1 : params.top_k]
        )
    mass = np.where(kept, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    if params.top_p < 1:
        order = np.argsort(-mass, axis=-1, kind="stable")
        ordered = np.take_along_axis(mass, order, -1).astype(np.float64)
        before = np.cumsum(ordered, axis=-1) - ordered
        reached = before >= params.top_p * ordered.sum(axis=-1, keepdims=True)
        reached[:, 0] = False
        np.put_along_axis(mass, order, np.where(reached, 0, ordered), -1)
    # The likeliest token's mass is 1.
    return (mass > 0) & (mass >= params.min_p)


def draw(logits: np.ndarray, uniforms: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Draw a token `[n]` per row by inverse CDF, from the candidates of logits `[n, k]`."""
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float64)
    if params.restricts:
        mass[~candidates(logits, params)] = 0
    sums = np.cumsum(mass, axis=-1)
    target = np.minimum(uniforms[:, None] * sums[:, -1:], sums[:, -1:] * (1 - 2**-23))
    tokens: np.ndarray = (sums <= target).sum(axis=-1)
    return tokens
