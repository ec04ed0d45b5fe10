"""The sampler on the host: runs whole steps, and redraws tokens from restricted candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from canvasrt.runtime.host_head import HostHead
from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.sampling_params import SamplingParams

# `redrawn` widens its ranges of uniform numbers by this margin, to cover rounding errors of low-precision entropies.
_MARGIN = 1e-3


def host_step(
    head: HostHead,
    hidden: np.ndarray,
    allowed: Mapping[int, np.ndarray],
    params: SamplingParams,
    step: int,
    uniforms: np.ndarray,
    noise: np.ndarray,
) -> DenoiseOutput:
    """Sample denoising step `step` as the exported head does, but only from the allowed tokens.

    Args:
        hidden: the last layer's output, float32 `[canvas, hidden_size]`.
        allowed: for each restricted position, the tokens that it can have, int64 `[k]`; a single token pins the
        position. Positions that are not listed can have any token.
        uniforms: float32 `[canvas]` in [0, 1).
        noise: int64 `[canvas]`, the new tokens of positions that are not accepted. Pinned positions keep their token.
    """
    (length, size), temperature = hidden.shape, params.temperature_at(step)
    argmax, drawn = np.empty(length, np.int64), np.empty(length, np.int64)
    entropy, soft = np.zeros(length, np.float32), np.empty((length, size), np.float32)
    noise = noise.copy()
    free = np.array([i for i in range(length) if i not in allowed], np.int64)
    if free.size:
        logits = biased(head.logits(hidden[free]), params) / temperature
        best, chosen, spread, mass = _draw(logits, uniforms[free], params)
        argmax[free], drawn[free], entropy[free] = best, chosen, spread
        soft[free] = head.mean_embedding(mass)
    pins = np.array([i for i, tokens in allowed.items() if len(tokens) == 1], np.int64)
    if pins.size:
        tokens = np.array([allowed[int(i)][0] for i in pins], np.int64)
        argmax[pins], drawn[pins], noise[pins] = tokens, tokens, tokens
        soft[pins] = head.embed(tokens)
    for tokens, here in _groups(allowed):
        logits = biased(head.logits(hidden[here], tokens), params, tokens) / temperature
        best, chosen, spread, mass = _draw(logits, uniforms[here], params)
        argmax[here], drawn[here], entropy[here] = tokens[best], tokens[chosen], spread
        soft[here] = head.mean_embedding(mass, tokens)
    accepted = accept(entropy, params.entropy_bound)
    canvas = np.where(accepted, drawn, noise)
    following = head.next_hidden(canvas, soft)
    return DenoiseOutput(canvas, argmax, entropy, accepted, following, hidden)


def _groups(allowed: Mapping[int, np.ndarray]) -> list[tuple[np.ndarray, list[int]]]:
    """Return every distinct array of two or more allowed tokens, with its positions."""
    groups: dict[int, tuple[np.ndarray, list[int]]] = {}
    for position, tokens in allowed.items():
        if len(tokens) > 1:
            groups.setdefault(id(tokens), (tokens, []))[1].append(position)
    return list(groups.values())


def accept(entropy: np.ndarray, bound: float) -> np.ndarray:
    """Return the accepted positions, bool `[canvas]`. A position is accepted if the entropies of all more certain
    positions sum to at most `bound`, as in `export/head.py`."""
    order = np.argsort(entropy, kind="stable")
    ordered = entropy[order]
    kept = np.zeros(len(entropy), bool)
    kept[order] = np.cumsum(ordered, dtype=np.float32) - ordered <= np.float32(bound)
    return kept


def _draw(
    logits: np.ndarray, uniforms: np.ndarray, params: SamplingParams
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the columns of the likeliest and of the drawn tokens, the entropies (each `[n]`), and the probabilities
    `[n, k]`."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    mass = np.exp(shifted)
    total = mass.sum(axis=-1, keepdims=True)
    entropy = (np.log(total) - (mass * shifted).sum(axis=-1, keepdims=True) / total)[:, 0]
    return logits.argmax(axis=-1), draw(logits, uniforms, params), entropy, mass / total


def redrawn(
    head: HostHead,
    output: DenoiseOutput,
    params: SamplingParams,
    temperature: np.float32,
    uniforms: np.ndarray,
) -> tuple[DenoiseOutput, np.ndarray, np.ndarray]:
    """Redraw a step's accepted positions from the tokens that `candidates` allows. Return the step's output, the
    positions `[n]` whose tokens changed, and the next hidden states of these positions `[n, hidden_size]`.

    Acceptance and self-conditioning still use the whole distribution. The host scores only positions where the
    restriction can matter. At entropy H, the likeliest token has a probability of at least e⁻ᴴ. So if
    1 − e⁻ᴴ < uniform < e⁻ᴴ, that token is drawn from any set of candidates.
    """
    assert output.hidden is not None
    rest = 1 - np.exp(-np.maximum(output.entropy, 0)) + _MARGIN
    open_ones = (uniforms <= rest) | (uniforms >= 1 - rest) | (output.canvas != output.argmax)
    places = np.flatnonzero(output.accepted & open_ones)
    if not places.size:  # the usual case, so the whole vocabulary's table is rarely read
        return output, places, np.empty((0, output.hidden.shape[1]), np.float32)
    logits = head.logits(output.hidden[places]) / temperature
    tokens = draw(logits, uniforms[places], params)
    changed = tokens != output.canvas[places]
    if not changed.any():
        return output, places[:0], np.empty((0, output.hidden.shape[1]), np.float32)
    places, tokens, logits = places[changed], tokens[changed], logits[changed]
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True))
    soft = head.mean_embedding(mass / mass.sum(axis=-1, keepdims=True))
    canvas = output.canvas.copy()
    canvas[places] = tokens
    return replace(output, canvas=canvas), places, head.next_hidden(tokens, soft)


def biased(
    logits: np.ndarray, params: SamplingParams, tokens: np.ndarray | None = None
) -> np.ndarray:
    """Add `logit_bias` to raw logits `[n, k]` in place; return them. Column i is the logit of `tokens[i]`, int64 `[k]`,
    ascending; by default, the columns are the whole vocabulary."""
    if params.logit_bias:
        ids, values = (np.array(each) for each in zip(*params.logit_bias, strict=True))
        if tokens is not None:
            held = np.isin(ids, tokens)
            ids, values = np.searchsorted(tokens, ids[held]), values[held]
        logits[:, ids] += values.astype(np.float32)
    return logits


def candidates(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return which tokens can be drawn, bool `[n, k]`. `logits` `[n, k]` are already divided by the temperature.

    `top_k`, `top_p` and `min_p` are applied in this order, as in `TopKLogitsWarper`, `TopPLogitsWarper` and
    `MinPLogitsWarper` of transformers.
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
    # `min_p` is relative to the likeliest token's probability, and `mass` is scaled so that this token has 1.
    return (mass > 0) & (mass >= params.min_p)


def draw(logits: np.ndarray, uniforms: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Draw one of the candidates per row of `logits` `[n, k]`, by inverse CDF. Return the drawn columns `[n]`."""
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float64)
    if params.restricts:
        mass[~candidates(logits, params)] = 0
    sums = np.cumsum(mass, axis=-1)
    target = np.minimum(uniforms[:, None] * sums[:, -1:], sums[:, -1:] * (1 - 2**-23))
    tokens: np.ndarray = (sums <= target).sum(axis=-1)
    return tokens
