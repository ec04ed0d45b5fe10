"""The few sizes of passes on a GPU. An engine compiles each of them once, before the first request."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import PREFILL_CHUNK

ENCODE, DENOISE = "encode", "denoise"  # the phases of a request
# Slots per expert come in units of this.
SLOT_UNIT = 16
# Rows per block of one expert, where rows are sorted by expert. Tensor cores take as many; more would leave more of a block
# empty.
BLOCK_ROWS = 16
# The dimensions of a graph that slots have.
SLOT_SIZES = ("capacity", "gate_rows", "gate_queues")
# Tokens of an encoding pass. Up to `ROOMY`, every expert has a slot for each of them.
LENGTHS, ROOMY = (64, 128, 256, PREFILL_CHUNK), 256
# Cached tokens come in units of this, so that every request's begin at an aligned address.
UNIT = 64
# Widths of a full layer's past: at most so many, the first of so many tokens.
WIDTHS, FIRST_WIDTH = 5, 2048


@dataclass(frozen=True)
class PassShape:
    """One kind of pass: `batch` requests of `length` tokens, `capacity` slots per expert, `width` cached tokens."""

    phase: str
    batch: int
    length: int
    capacity: int
    width: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What an engine sees of it: the phase is an input."""
        return self.batch, self.length, self.capacity, self.width


@dataclass(frozen=True)
class Range:
    """The smallest, usual and largest size of one dimension."""

    min: int
    opt: int
    max: int

    def holds(self, size: int) -> bool:
        """Return whether the range includes a size."""
        return self.min <= size <= self.max

    def to_json(self) -> dict[str, int]:
        """Return the range as in the manifest."""
        return asdict(self)


def in_units(tokens: int) -> int:
    """Round up to a number of tokens that a cache may have."""
    return max(UNIT, -(-tokens // UNIT) * UNIT)


def usual_capacity(model: ModelConfig, tokens: int) -> int:
    """Return the slots per expert that hold the fullest one with near-uniform routing: 8 deviations above the mean."""
    mean = tokens * model.top_k_experts / model.num_experts
    wanted = math.ceil((mean + 8 * math.sqrt(mean)) / SLOT_UNIT) * SLOT_UNIT
    return min(tokens, wanted)


def capacities(model: ModelConfig) -> tuple[int, ...]:
    """Return the slots per expert that a pass of one request's canvas may have, the fewest first.

    The first hold near-uniform routing. Those in the middle hold a canvas half of whose tokens route alike, such as
    padding. The last hold all tokens.
    """
    tokens = model.canvas_length
    middle = tokens // 2 + usual_capacity(model, tokens // 2)
    return tuple(sorted({usual_capacity(model, tokens), middle, tokens} - {0}))


def roomy_capacity(model: ModelConfig, longest: int) -> int:
    """Return the slots per expert of encoding passes of up to `longest` tokens in which nothing can overflow.

    Passes of text are cut in two before they need more than `ROOMY`, except for those of a whole canvas. Tokens of an
    image stay in one.
    """
    if model.vision is not None:
        return longest
    return round_up(min(longest, max(ROOMY, model.canvas_length)), lengths(longest))


def canvas_sizes(length: int) -> tuple[int, ...]:
    """Return the lengths, ascending, that a canvas may have: an eighth, a quarter, a half and all of the
    checkpoint's."""
    return tuple(length // part for part in (8, 4, 2, 1) if length % part == 0)


def widths(most: int) -> tuple[int, ...]:
    """Return the widths of a past of up to `most` tokens: powers of two, then `most`.

    At most `WIDTHS`. If every power would be too many, the lower ones are a factor of four (or more) apart, since
    short pasts cost little.
    """
    powers = [FIRST_WIDTH]
    while 2 * powers[-1] < most:
        powers.append(2 * powers[-1])
    powers = [width for width in powers if width < most]
    index = 1
    while len(powers) >= WIDTHS:
        del powers[index]
        index = index + 1 if index + 1 < len(powers) else 1
    return (*powers, most)


def lengths(most: int) -> tuple[int, ...]:
    """Return the lengths of encoding passes of up to `most` tokens."""
    return (*(length for length in LENGTHS if length < most), most)


def round_up(size: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of `sizes`, in order, that holds `size`."""
    return next(each for each in sizes if each >= size)
