"""Builds the inputs of body graphs: cached tokens in octets (groups of eight), expert slots, masks and rotations."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import CALL_LENGTH, OCTET, octets
from canvasrt.runtime.engine import Arrays, Segment

MULTIPLE = 4
# The capacity (slots per expert) is SLACK times the busiest expert's tokens, plus SPARE. If one expert has too few
# slots, the whole segment runs again, which costs more than a few empty slots.
SLACK, SPARE = 1.15, 4


def past_in_octets(array: np.ndarray, axis: int, empty: float = 0) -> np.ndarray:
    """Reshape axis `axis`, whose entries are cached tokens, to `[octets, 8]`. Pad the last octet with `empty`."""
    tokens = array.shape[axis]
    missing = octets(tokens) * OCTET - tokens
    if missing:
        padding = [(0, missing if each == axis else 0) for each in range(array.ndim)]
        array = np.pad(array, padding, constant_values=empty)
    return array.reshape(*array.shape[:axis], -1, OCTET, *array.shape[axis + 1 :])


@cache
def expert_slots(capacity: int, experts: int) -> Arrays:
    """Return the inputs that give every expert `capacity` slots in both of its matrix products."""
    slots = np.arange(capacity, dtype=np.int64)
    return {"slots": slots, "gate_slots": slots, "gate_queues": np.arange(experts, dtype=np.int64)}


class Geometry:
    """Adds masks and rotations to the inputs, for bundles that compute them in a separate graph
    (`canvasrt.graphs.geometry`). For other bundles, inputs are unchanged."""

    def __init__(self, segment: Segment | None = None) -> None:
        self._segment = segment

    def complete(self, feeds: Arrays) -> Arrays:
        """Return `feeds` plus masks, rotations and sizes. Reshape cached keys and values to `[B, kv_heads, O * 8,
        head_dim]`."""
        if self._segment is None:
            return feeds
        flat = {
            name: value.reshape(*value.shape[:2], -1, value.shape[4])
            for name, value in feeds.items()
            if name.startswith(("past_key_", "past_value_"))
        }
        length = {CALL_LENGTH: np.empty((0, feeds["positions"].shape[1] << 20), np.bool_)}
        given = {name: feeds[name] for name in self._segment.inputs}
        return feeds | flat | length | self._segment.run(given)


class Capacity:
    """The slots per expert in one body segment for one request, learned from the request's own passes.

    GPUs have a fixed pass plan instead. A CPU needs no plan, because passes can have any shape; but every slot costs
    time. Every request learns separately. Otherwise one request's history would change the shapes of another request's
    passes, and with the shapes the last bits of the results.
    """

    def __init__(self, config: ModelConfig) -> None:
        # Before the first pass, assume twice the mean load.
        self._share = min(1.0, 2 * config.top_k_experts / config.num_experts)
        self._seen = False

    def choose(self, tokens: int) -> int:
        """Return the slots per expert for a pass over `tokens` tokens. No expert can need more slots than `tokens`."""
        return rounded(self._share * tokens, tokens)

    def record(self, load: int, tokens: int) -> None:
        """Learn from `load`, the tokens of a pass's busiest expert. The capacity rises immediately and falls slowly."""
        share = (load * SLACK + SPARE) / tokens
        falling = share if not self._seen else max(share, 0.75 * self._share + 0.25 * share)
        self._share, self._seen = min(1.0, falling), True


def rounded(capacity: float, tokens: int) -> int:
    """Round `capacity` up to a multiple of `MULTIPLE`, to limit the number of shapes. The result is between 1 and
    `tokens`."""
    return min(tokens, max(1, math.ceil(capacity / MULTIPLE) * MULTIPLE))
