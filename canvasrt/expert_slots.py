"""How many slots an expert gets in a pass: as planned for a GPU, or as a request has learned on a CPU."""

from __future__ import annotations

import math

from canvasrt.checkpoints.config import ModelConfig

# On a GPU, the number of slots per expert is a multiple of this; on a CPU, of `MULTIPLE`.
SLOT_UNIT, MULTIPLE = 16, 4
ROOMY = 256  # in encoding passes of up to this many tokens, every expert has a slot for every token
# On a CPU, the capacity is SLACK times the busiest expert's tokens, plus SPARE. If one expert has too few slots, the
# whole segment runs again, which costs more than a few empty slots.
SLACK, SPARE = 1.15, 4


def usual_capacity(model: ModelConfig, tokens: int) -> int:
    """Return the slots per expert for near-uniform routing: 8 standard deviations above the mean."""
    mean = tokens * model.top_k_experts / model.num_experts
    wanted = math.ceil((mean + 8 * math.sqrt(mean)) / SLOT_UNIT) * SLOT_UNIT
    return min(tokens, wanted)


def encode_capacity(model: ModelConfig, length: int) -> int:
    """Return the slots per expert of an encoding pass: one per token in passes of up to `ROOMY` tokens."""
    return length if length <= ROOMY else usual_capacity(model, length)


def capacities(model: ModelConfig) -> tuple[int, ...]:
    """Return the possible numbers of slots per expert of a pass over one request's canvas, ascending.

    The first suffices if routing is near-uniform, and the second if half of the tokens, such as padding, have the same
    experts. The last suffices even if all tokens have the same experts.
    """
    tokens = model.canvas_length
    middle = tokens // 2 + usual_capacity(model, tokens // 2)
    return tuple(sorted({usual_capacity(model, tokens), middle, tokens} - {0}))


def roomy_capacity(model: ModelConfig, longest: int) -> int:
    """Return how many slots per expert an encoding pass of up to `longest` tokens needs, so that no expert can overflow.

    Text passes that would need more than `ROOMY` slots are split in two, except passes of a whole canvas. An image's
    tokens are not split.
    """
    if model.vision is not None:
        return longest
    return min(longest, max(ROOMY, model.canvas_length))


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
        return rounded_capacity(self._share * tokens, tokens)

    def record(self, load: int, tokens: int) -> None:
        """Learn from `load`, the tokens of a pass's busiest expert. The capacity rises immediately and falls slowly."""
        share = (load * SLACK + SPARE) / tokens
        falling = share if not self._seen else max(share, 0.75 * self._share + 0.25 * share)
        self._share, self._seen = min(1.0, falling), True


def rounded_capacity(capacity: float, tokens: int) -> int:
    """Round `capacity` up to a multiple of `MULTIPLE`, to limit the number of shapes. The result is between 1 and
    `tokens`."""
    return min(tokens, max(1, math.ceil(capacity / MULTIPLE) * MULTIPLE))
