"""Builds the inputs of body graphs: cached tokens in octets (groups of eight), expert slots, masks and rotations."""

from __future__ import annotations

from functools import cache

import numpy as np

from canvasrt.defaults import CALL_LENGTH, OCTET, octets
from canvasrt.runtime.engine import Arrays, Segment


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
