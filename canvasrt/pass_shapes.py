"""The plan of passes on a GPU: the few sizes that they have. A build writes it into the manifest, and an engine compiles each size
once, before the first request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.defaults import PREFILL_CHUNK

ENCODE, DENOISE = "encode", "denoise"  # the phases of a request
# Rows per expert are a multiple of this.
SLOT_UNIT = 16
# Rows per block of one expert, where rows are sorted by expert: the fewest that tensor cores take, since larger blocks would be
# emptier.
BLOCK_ROWS = 16
# The dimensions of a graph that experts with slots have.
SLOT_SIZES = ("capacity", "gate_rows", "gate_queues")
# Tokens of an encoding pass. Up to `ROOMY` tokens, every expert has a row per token.
LENGTHS, ROOMY = (64, 128, 256, PREFILL_CHUNK), 256
# Caches hold a multiple of this many tokens, so that every request's begins at an aligned address.
UNIT = 64
# A full layer's past has at most `WIDTHS` widths, of which the shortest holds `FIRST_WIDTH` tokens.
WIDTHS, FIRST_WIDTH = 5, 2048


@dataclass(frozen=True)
class PassShape:
    """One kind of pass: `batch` requests of `length` tokens, `capacity` rows per expert, `width` cached tokens."""

    phase: str
    batch: int
    length: int
    capacity: int
    width: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes that an engine sees; the phase is an input."""
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


@dataclass(frozen=True)
class PassPlan:
    """The sizes of one model's passes. Tuples ascend.

    Attributes:
        canvas: tokens of a canvas.
        batch: canvases of a pass that requests share; such a pass always has as many.
        lengths: tokens of encoding passes, each of one request.
        encode_rows: rows per expert of each of those.
        roomy: the length of the encoding pass that overflows no expert.
        canvas_rows: rows per expert that a pass over one canvas may have.
        batch_rows: rows per expert of a shared pass.
        widths: cached tokens that a pass reads in a full layer.
        window: cached tokens of a sliding layer.
        shares: whether requests may share denoising passes. A request's result must not depend on the number or length of
        others, so all shared ones have the last width.
    """

    canvas: int
    batch: int
    lengths: tuple[int, ...]
    encode_rows: tuple[int, ...]
    roomy: int
    canvas_rows: tuple[int, ...]
    batch_rows: int
    widths: tuple[int, ...]
    window: int
    shares: bool = False

    @property
    def prefill_chunk(self) -> int:
        """The most tokens of a prompt that one pass encodes."""
        return min(PREFILL_CHUNK, self.lengths[-1])

    @property
    def most_rows(self) -> int:
        """The most rows per expert of any pass."""
        return max(self.roomy, self.batch_rows, *self.encode_rows, *self.canvas_rows)

    def cached(self, layer: Layer) -> int:
        """Return the most cached tokens of a layer."""
        return self.window if layer.kind == "sliding" else self.widths[-1]

    def within(self, context: int) -> PassPlan:
        """Return the plan for requests of at most `context` tokens."""
        most = in_units(context)
        if most >= self.widths[-1]:
            return self
        return replace(self, widths=widths(most), window=min(self.window, most))

    def sharing(self) -> PassPlan:
        """Return the plan for requests that share passes."""
        return replace(self, shares=self.batch > 1)

    def encode(self, tokens: int, width: int) -> PassShape:
        """Return the shape of the pass that encodes one request's `tokens`.

        Long pasts have fewer lengths: there, padding costs little.
        """
        length = round_up(tokens, self.lengths)
        if width > self.widths[0]:
            length = max(length, round_up(min(ROOMY, self.lengths[-1]), self.lengths))
        rows = self.encode_rows[self.lengths.index(length)]
        return PassShape(ENCODE, 1, length, rows, width)

    def without_overflow(self) -> PassShape:
        """Return the shape of an encoding pass that no expert overflows. It is rare, so there is a single one, with the widest
        past."""
        return PassShape(ENCODE, 1, self.roomy, self.roomy, self.widths[-1])

    def denoise(self, width: int, load: int = 0) -> PassShape:
        """Return the shape of one request's denoising pass. `load`: the most tokens that an expert got so far."""
        rows = round_up(min(load, self.canvas_rows[-1]), self.canvas_rows)
        return PassShape(DENOISE, 1, self.canvas, rows, width)

    def shared(self) -> PassShape:
        """Return the shape of a denoising pass that requests share."""
        return PassShape(DENOISE, self.batch, self.canvas, self.batch_rows, self.widths[-1])

    def alone(self, canvas: int, width: int, load: int = 0) -> PassShape:
        """Return the shape of the pass that denoises one request's canvas, followed by padding.

        A canvas shorter than the checkpoint's takes a shape that encoding has too, so nothing more is
        compiled. If no such shape is smaller, it takes that of a whole canvas.
        """
        if canvas < self.canvas:
            shape = self.encode(canvas, width)
            # With fewer rows than tokens, an expert could overflow again and again.
            if shape.length < self.canvas and shape.capacity == shape.length:
                return replace(shape, phase=DENOISE)
        return self.denoise(width, load)

    def __iter__(self) -> Iterator[PassShape]:
        """Yield every shape once, the narrowest first."""
        shapes: list[PassShape] = []
        for width in self.widths:
            shapes += [self.encode(tokens, width) for tokens in self.lengths]
            shapes += [self.denoise(width, load) for load in self.canvas_rows]
        if self.shares:
            shapes.append(self.shared())
        yield from dict.fromkeys([*shapes, self.without_overflow()])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as in the manifest: without shared passes."""
        data = asdict(self)
        del data["shares"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PassPlan:
        """Return the inverse of `to_json`."""
        known: dict[str, Any] = {
            each.name: data[each.name] for each in fields(cls) if each.name != "shares"
        }
        lists = {name: tuple(each) for name, each in known.items() if isinstance(each, list)}
        return cls(**(known | lists))


def plan_passes(
    model: ModelConfig,
    max_context: int,
    max_batch: int,
    prefill_chunk: int = PREFILL_CHUNK,
    has_slots: bool = True,
) -> PassPlan:
    """Return the plan for up to `max_batch` requests of `max_context` tokens.

    `prefill_chunk`: the most tokens of an encoding pass. Without `has_slots`, experts have as many rows as tokens need.
    """
    canvas = model.canvas_length
    longest = max(canvas, min(prefill_chunk, max_context))
    sizes = lengths(longest)
    most = max(usual_capacity(model, longest), roomy_capacity(model, longest))
    if not has_slots:
        most = longest
    return PassPlan(
        canvas=canvas,
        batch=max_batch,
        lengths=sizes,
        encode_rows=tuple(encode_capacity(model, length) for length in sizes),
        roomy=max(length for length in sizes if length <= most),
        canvas_rows=capacities(model) if has_slots else (canvas,),
        batch_rows=usual_capacity(model, max_batch * canvas),
        widths=widths(in_units(max_context)),
        window=in_units(min(model.sliding_window - 1, max_context)),
    )


def in_units(tokens: int) -> int:
    """Round up to a number of tokens that a cache may have."""
    return max(UNIT, -(-tokens // UNIT) * UNIT)


def usual_capacity(model: ModelConfig, tokens: int) -> int:
    """Return the rows per expert that hold the fullest one with near-uniform routing: 8 deviations above the mean."""
    mean = tokens * model.top_k_experts / model.num_experts
    wanted = math.ceil((mean + 8 * math.sqrt(mean)) / SLOT_UNIT) * SLOT_UNIT
    return min(tokens, wanted)


def encode_capacity(model: ModelConfig, length: int) -> int:
    """Return the rows per expert of an encoding pass: one per token, up to `ROOMY`."""
    return length if length <= ROOMY else usual_capacity(model, length)


def capacities(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows per expert that a pass of one request's canvas may have, the fewest first.

    The fewest suffice for near-uniform routing. The middle number suffices if half of a canvas's tokens, such as padding, have
    the same experts. The most hold all tokens.
    """
    tokens = model.canvas_length
    middle = tokens // 2 + usual_capacity(model, tokens // 2)
    return tuple(sorted({usual_capacity(model, tokens), middle, tokens} - {0}))


def roomy_capacity(model: ModelConfig, longest: int) -> int:
    """Return the rows per expert of encoding passes of up to `longest` tokens in which nothing can overflow.

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
