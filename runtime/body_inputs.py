"""Builds the inputs of body graphs: past tokens in octets, and expert slots."""

from __future__ import annotations

from functools import cache

import numpy as np

from canvasrt.defaults import OCTET, octets
from canvasrt.runtime.engine import Arrays


def past_in_octets(array: np.ndarray, axis: int, empty: float = 0) -> np.ndarray:
    """Return an array whose `axis` counts cached tokens, with that axis as `[octets, 8]`, padded with `empty`."""
    tokens = array.shape[axis]
    missing = octets(tokens) * OCTET - tokens
    if missing:
        padding = [(0, missing if each == axis else 0) for each in range(array.ndim)]
        array = np.pad(array, padding, constant_values=empty)
    return array.reshape(*array.shape[:axis], -1, OCTET, *array.shape[axis + 1 :])


@cache
def expert_slots(capacity: int, experts: int) -> Arrays:
    """Return the inputs that give every expert `capacity` slots in both of its products."""
    slots = np.arange(capacity, dtype=np.int64)
    return {"slots": slots, "gate_slots": slots, "gate_queues": np.arange(experts, dtype=np.int64)}
