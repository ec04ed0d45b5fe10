"""The pass plan of a GPU: the few shapes that passes have. A build writes it to the manifest; kernels for all shapes
are compiled before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from canvasrt import expert_slots
from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.defaults import PREFILL_CHUNK

ENCODE, DENOISE = "encode", "denoise"  # the phases of a request
# If rows are sorted by expert, an expert's rows fill blocks of this many rows. Tensor cores cannot multiply fewer rows,
# and larger blocks would have more empty rows.
BLOCK_ROWS = 16
# Dimensions that a graph has only if its experts have slots.
SLOT_SIZES = ("capacity", "gate_rows", "gate_queues")
LENGTHS = (64, 128, 256, PREFILL_CHUNK)  # tokens of an encoding pass
# Cache widths, in tokens, are a multiple of this, so that each request's part of the cache has an aligned address.
UNIT = 64
# The maximum number of cache widths of a full layer, and the smallest width in tokens.
WIDTHS, FIRST_WIDTH = 5, 2048


@dataclass(frozen=True)
class PassShape:
    """The shape of a pass: `batch` requests of `length` tokens, `capacity` slots per expert, `width` cached tokens."""

    phase: str
    batch: int
    length: int
    capacity: int
    width: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes that determine an engine's tensor shapes. The phase does not affect them."""
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
    """The sizes of one model's passes. Tuples are in ascending order.

    Attributes:
        canvas: number of tokens in a canvas.
        batch: number of canvases in a shared pass; unused places are padding.
        lengths: possible numbers of tokens in an encoding pass, which is for one request.
        encode_rows: slots per expert for each of `lengths`.
        roomy: length of the encoding pass in which no expert can overflow.
        canvas_rows: possible numbers of slots per expert in a pass over one canvas.
        batch_rows: slots per expert in a shared pass.
        widths: possible numbers of cached tokens that a pass reads in a full layer.
        window: number of cached tokens that a pass reads in a sliding layer.
        shares: whether requests share denoising passes. A request's result must not depend on how many other requests
            there are or how long they are, so all shared passes have the largest width.
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
        """Maximum tokens of a prompt in one encoding pass."""
        return min(PREFILL_CHUNK, self.lengths[-1])

    @property
    def largest_capacity(self) -> int:
        """Maximum slots per expert over all passes."""
        return max(self.roomy, self.batch_rows, *self.encode_rows, *self.canvas_rows)

    def cached(self, layer: Layer) -> int:
        """Return the maximum number of cached tokens in layers of this layer's kind, sliding or full."""
        return self.window if layer.kind == "sliding" else self.widths[-1]

    def within(self, context: int) -> PassPlan:
        """Return the plan for requests of at most `context` tokens."""
        most = in_units(context)
        if most >= self.widths[-1]:
            return self
        return replace(self, widths=widths(most), window=min(self.window, most))

    def without_slots(self) -> PassPlan:
        """Return the plan for experts without slots, which have as many rows as the tokens need."""
        return replace(self, roomy=self.lengths[-1], canvas_rows=(self.canvas,))

    def sharing(self) -> PassPlan:
        """Return the plan for requests that share passes."""
        return replace(self, shares=self.batch > 1)

    def encode(self, tokens: int, width: int) -> PassShape:
        """Return the shape of the pass that encodes one request's `tokens`.

        Large widths have fewer lengths, because reading many cached tokens takes far longer than computing padding.
        """
        length = round_up(tokens, self.lengths)
        if width > self.widths[0]:
            length = max(length, round_up(min(expert_slots.ROOMY, self.lengths[-1]), self.lengths))
        return PassShape(ENCODE, 1, length, self.encode_rows[self.lengths.index(length)], width)

    def without_overflow(self) -> PassShape:
        """Return the shape of the encoding pass in which no expert can overflow. There is only one such shape, with the
        largest width, because such passes are rare."""
        return PassShape(ENCODE, 1, self.roomy, self.roomy, self.widths[-1])

    def denoise(self, width: int, need: int = 0) -> PassShape:
        """Return the shape of one request's denoising pass. `need`: the most slots that an expert is known to need."""
        capacity = round_up(min(need, self.canvas_rows[-1]), self.canvas_rows)
        return PassShape(DENOISE, 1, self.canvas, capacity, width)

    def shared(self) -> PassShape:
        """Return the shape of a shared denoising pass."""
        return PassShape(DENOISE, self.batch, self.canvas, self.batch_rows, self.widths[-1])

    def alone(self, canvas: int, width: int, need: int = 0) -> PassShape:
        """Return the shape of the pass that denoises one request's small canvas, followed by padding.

        Small canvases use the shapes of encoding passes, so that no further shapes are compiled. But if the encoding
        pass would be as long as a whole canvas, or could overflow an expert, the shape of a whole canvas is used.
        """
        if canvas < self.canvas:
            shape = self.encode(canvas, width)
            # With fewer slots than tokens, an expert could overflow repeatedly.
            if shape.length < self.canvas and shape.capacity == shape.length:
                return replace(shape, phase=DENOISE)
        return self.denoise(width, need)

    def __iter__(self) -> Iterator[PassShape]:
        """Yield every shape once, narrowest first."""
        shapes: list[PassShape] = []
        for width in self.widths:
            shapes += [self.encode(tokens, width) for tokens in self.lengths]
            shapes += [self.denoise(width, capacity) for capacity in self.canvas_rows]
        if self.shares:
            shapes.append(self.shared())
        yield from dict.fromkeys([*shapes, self.without_overflow()])

    def at_start(self, canvas_sizes: Sequence[int]) -> list[tuple[PassShape, int, int]]:
        """Return the passes to run at start-up: each pass's shape, canvas length, and place in the batch.

        Every place keeps its latest captured CUDA graph. So the shape with which most requests start comes last: a whole
        canvas, few cached tokens and the fewest expert slots.
        """
        narrow = self.widths[0]
        usual = self.denoise(narrow), self.canvas
        shapes = [(shape, shape.length) for shape in self]
        shapes += [(self.alone(size, narrow), size) for size in canvas_sizes[:-1]]
        first = [(*each, 0) for each in reversed(shapes) if each != usual]
        return [*first, *((*usual, place) for place in range(self.batch))]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as in the manifest, which does not say whether passes are shared."""
        data = asdict(self)
        del data["shares"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PassPlan:
        """Return the plan that `to_json` wrote."""
        known: dict[str, Any] = {
            each.name: data[each.name] for each in fields(cls) if each.name != "shares"
        }
        lists = {name: tuple(each) for name, each in known.items() if isinstance(each, list)}
        return cls(**(known | lists))


def plan_passes(
    model: ModelConfig, max_context: int, max_batch: int, prefill_chunk: int = PREFILL_CHUNK
) -> PassPlan:
    """Return the plan for experts that have slots, up to `max_batch` requests, and up to `max_context` tokens per request.

    `prefill_chunk`: maximum number of tokens in an encoding pass.
    """
    canvas = model.canvas_length
    longest = max(canvas, min(prefill_chunk, max_context))
    sizes = lengths(longest)
    roomy = round_up(expert_slots.roomy_capacity(model, longest), sizes)
    most = max(expert_slots.usual_capacity(model, longest), roomy)
    return PassPlan(
        canvas=canvas,
        batch=max_batch,
        lengths=sizes,
        encode_rows=tuple(expert_slots.encode_capacity(model, length) for length in sizes),
        roomy=max(length for length in sizes if length <= most),
        canvas_rows=expert_slots.capacities(model),
        batch_rows=expert_slots.usual_capacity(model, max_batch * canvas),
        widths=widths(in_units(max_context)),
        window=in_units(min(model.sliding_window - 1, max_context)),
    )


def in_units(tokens: int) -> int:
    """Round a number of tokens up to a valid cache width."""
    return max(UNIT, -(-tokens // UNIT) * UNIT)


def canvas_sizes(length: int) -> tuple[int, ...]:
    """Return the possible lengths of a canvas, ascending: an eighth, a quarter, a half and all of `length`."""
    return tuple(length // part for part in (8, 4, 2, 1) if length % part == 0)


def widths(most: int) -> tuple[int, ...]:
    """Return the cache widths for up to `most` cached tokens: powers of two, then `most`.

    There are at most `WIDTHS` widths. If some powers of two must be left out, small widths are a factor of four or more
    apart, since reading few cached tokens costs little.
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
    """Return the smallest of the ascending `sizes` that is at least `size`."""
    return next(each for each in sizes if each >= size)
