"""How many slots each expert gets in a pass: enough for nearly every pass, and little more."""

from __future__ import annotations

import math

from canvasrt.checkpoints.config import ModelConfig

MULTIPLE = 4
# An overflow repeats a whole segment, which costs more than a few empty slots.
SLACK, SPARE = 1.15, 4


class Capacity:
    """The capacity of one body segment for one request, learned from the request's own passes.

    With loads shared between requests, one request's history would change the shapes of another's
    passes, and with them the last bits of its results.
    """

    def __init__(self, config: ModelConfig) -> None:
        # Twice the mean load until a load has been seen.
        self._share = min(1.0, 2 * config.top_k_experts / config.num_experts)
        self._seen = False

    def choose(self, tokens: int) -> int:
        """Return the slots per expert for a pass over `tokens` tokens. With all `tokens`, nothing
        can overflow."""
        return rounded(self._share * tokens, tokens)

    def record(self, load: int, tokens: int) -> None:
        """Learn from a pass's largest load: rise at once, fall slowly."""
        share = (load * SLACK + SPARE) / tokens
        falling = share if not self._seen else max(share, 0.75 * self._share + 0.25 * share)
        self._share, self._seen = min(1.0, falling), True


def rounded(capacity: float, tokens: int) -> int:
    """Round `capacity` up to a small multiple, so that shapes stay few; the result is from 1 to
    `tokens`."""
    return min(tokens, max(1, math.ceil(capacity / MULTIPLE) * MULTIPLE))
