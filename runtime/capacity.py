"""How many slots an expert gets in a pass: enough for nearly every pass, and little more."""

from __future__ import annotations

import math

from canvasrt.checkpoints.config import ModelConfig

MULTIPLE = 4
# An overflow repeats a whole segment, which costs more than some slots that stay empty.
SLACK, SPARE = 1.15, 4


class Capacity:
    """The capacity of one body segment for one request, learned from the request's own passes.

    A shared memory of loads would let one request's history change the shapes, and with them the
    last bits, of another's.
    """

    def __init__(self, config: ModelConfig) -> None:
        # Twice the mean load, until a load has been seen.
        self._share = min(1.0, 2 * config.top_k_experts / config.num_experts)
        self._seen = False

    def choose(self, tokens: int) -> int:
        """Slots an expert for a pass over `tokens` tokens; at most `tokens`, which cannot overflow."""
        return rounded(self._share * tokens, tokens)

    def record(self, load: int, tokens: int) -> None:
        """Learns from a pass's largest load: rises at once, falls slowly."""
        share = (load * SLACK + SPARE) / tokens
        falling = share if not self._seen else max(share, 0.75 * self._share + 0.25 * share)
        self._share, self._seen = min(1.0, falling), True


def rounded(capacity: float, tokens: int) -> int:
    """`capacity` rounded up to a small multiple, so that few shapes occur; from 1 to `tokens`."""
    return min(tokens, max(1, math.ceil(capacity / MULTIPLE) * MULTIPLE))


def stepped(capacity: int, most: int) -> int:
    """`capacity` rounded up to 2ᵏ or 3·2ᵏ from 8 on, at most `most`: an engine is captured once a shape."""
    size = 8
    while size < capacity:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(most, size)
