"""The key-value caches of all requests in device memory; passes read and extend them in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.pass_shapes import round_up
from canvasrt.runtime.body_inputs import Capacity
from canvasrt.runtime.engine import Device, Pitched

ALIGNMENT = 256  # TensorRT's requirement for addresses


def aligned(size: int) -> int:
    """Round `size` up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class DeviceRow:
    """A model's state of one request: a slot of the device's caches, taken with its first
    tokens."""

    kv_slot: int | None = None
    length: int = 0  # clean tokens in the cache
    width: int = 0  # tokens that its full layers have room for now
    # Counts the hidden states that the device computed for the request; None if it holds none.
    hidden: int | None = None
    # The rows per expert of a body segment since a block's canvas overloaded one of its experts, by the tokens cached before
    # the block, and the segment.
    loads: dict[tuple[int, int], int] = field(default_factory=dict)
    # Nothing is learned from earlier passes: their shapes are fixed.
    capacities: dict[tuple[str, str], Capacity] = field(default_factory=dict)

    def load(self, segment: int) -> int:
        """Return the rows that a segment's experts need in this block, or 0 if none was overloaded so far."""
        return self.loads.get((self.length, segment), 0)

    def overload(self, segment: int, load: int) -> None:
        """Note the rows that a segment's experts need until the block ends, even if its tokens are
        encoded again."""
        self.loads[self.length, segment] = load


@dataclass(frozen=True)
class Resident:
    """Hidden states of a canvas that stay on the device. `number` tells a row's newest from older ones."""

    row: DeviceRow
    number: int
    length: int  # positions of the canvas


@dataclass(frozen=True)
class LayerCache:
    """One layer's caches: keys and values, each `[slots, kv_heads, most, head_dim]`. Sizes are in bytes.

    A request's part begins at the same place whatever its width: `[kv_heads, width, head_dim]`.
    """

    kind: str
    heads: int
    token: int
    keys: int
    values: int


@dataclass
class Past:
    """What layers of one kind share."""

    most: int  # tokens that a slot has memory for
    positions: int  # address of int64 `[slots, most]`, of which a pass reads `[batch, width]`
    shown: list[tuple[int, int]]  # the width and length that each slot's were written for


class DeviceCache:
    """Slots for requests, each with keys and values of every layer.

    Each request has a width of its own in full layers, so that its passes do not depend on other requests. A slot's
    addresses never change. A sliding layer's part is a ring, always of the same width: the order of cached tokens does
    not matter, since each carries its position. Empty places have position −1. Memory starts as zeros, because masked
    keys still take part, with weight zero.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        slots: int,
        most: dict[str, int],
        itemsizes: Sequence[int],
        widths: Sequence[int] = (),
    ) -> None:
        """Take all memory.

        most: tokens per kind of layer; `widths` are those that a full layer may have, its `most` last.
        Raises CanvasError for caches whose slots would not begin at aligned addresses.
        """
        self._device = device
        self.widths = tuple(widths) or (most["full"],)
        self._ring = min(config.sliding_window - 1, most["sliding"])
        self._rows: list[weakref.ref[DeviceRow] | None] = [None] * slots
        self.past = {
            kind: Past(count, device.allocate(slots * count * 8), [(0, 0)] * slots)
            for kind, count in most.items()
            if any(layer.kind == kind for layer in config.layers)
        }
        sizes = [
            self._size(layer, item) for layer, item in zip(config.layers, itemsizes, strict=True)
        ]
        if any(size % ALIGNMENT for size in sizes):
            raise CanvasError(
                f"caches of {most['sliding']} and {most['full']} tokens do not end at multiples of {ALIGNMENT} bytes",
                "build the bundle again with this version",
            )
        self.bytes = 2 * slots * sum(sizes)
        self._layers = [
            LayerCache(
                layer.kind,
                layer.num_kv_heads,
                layer.head_dim * item,
                device.allocate(slots * size),
                device.allocate(slots * size),
            )
            for layer, item, size in zip(config.layers, itemsizes, sizes, strict=True)
        ]
        self.scratch_bytes = max(sizes)
        self._scratch = device.allocate(self.scratch_bytes)

    def _size(self, layer: Layer, itemsize: int) -> int:
        return layer.num_kv_heads * self.past[layer.kind].most * layer.head_dim * itemsize

    @property
    def slots(self) -> int:
        return len(self._rows)

    def row(self, slot: int) -> DeviceRow | None:
        """Return the request in a slot, or None if it is free."""
        held = self._rows[slot]
        row = held() if held else None
        return row if row is not None and row.kv_slot == slot else None

    def rows(self) -> list[DeviceRow]:
        """Return the requests that have a slot, in slot order."""
        return [row for slot in range(self.slots) if (row := self.row(slot))]

    def take(self, row: DeviceRow) -> None:
        """Give a request the first free slot."""
        if row.kv_slot is not None:
            return
        free = next((slot for slot in range(self.slots) if self.row(slot) is None), None)
        if free is None:
            raise CanvasError(
                f"all {self.slots} cache slots are taken",
                "run fewer requests together, or build with a larger --max-batch",
            )
        row.kv_slot, row.width = free, self.widths[0]
        self._rows[free] = weakref.ref(row)

    def release(self, row: DeviceRow) -> None:
        """Free a request's slot and forget its contents."""
        if row.kv_slot is not None:
            self._rows[row.kv_slot] = None
        row.kv_slot, row.length, row.hidden = None, 0, None
        row.loads.clear()

    def append(
        self, row: DeviceRow, layer: int, keys: int, values: int, length: int, count: int
    ) -> None:
        """Copy one layer's first `count` new tokens, `[kv_heads, length, head_dim]` at `keys` and
        `values`.

        Call `make_room` before the first layer, and update the row's `length` after the last.
        """
        cache, after = self._layers[layer], row.length + count
        begin = after - (count if cache.kind == "full" else min(count, self._ring))
        for position, place, size in self._pieces(cache, begin, after):
            done = position - row.length
            for base, new in ((cache.keys, keys), (cache.values, values)):
                self._device.copy(
                    self._held(cache, base, row, place),
                    Pitched(new + done * cache.token, length * cache.token),
                    size * cache.token,
                    cache.heads,
                )

    def extract(
        self,
        row: DeviceRow,
        layer: int,
        keys: int,
        values: int,
        length: int,
        begin: int,
        count: int,
    ) -> None:
        """Copy one layer's tokens from position `begin` on, as far as they are still cached, to the
        place where `append` reads."""
        cache = self._layers[layer]
        oldest = row.length - self._kept(cache.kind, row.length)
        for position, place, size in self._pieces(cache, max(begin, oldest), begin + count):
            done = position - begin
            for base, to in ((cache.keys, keys), (cache.values, values)):
                self._device.copy(
                    Pitched(to + done * cache.token, length * cache.token),
                    self._held(cache, base, row, place),
                    size * cache.token,
                    cache.heads,
                )

    def keeps(self, layer: int, position: int, length: int) -> bool:
        """Return whether a layer still has this position when `length` tokens are cached."""
        return position >= length - self._kept(self._layers[layer].kind, length)

    @property
    def token_sizes(self) -> list[int]:
        """The bytes of one token's keys in each layer; its values take as many."""
        return [layer.heads * layer.token for layer in self._layers]

    def _pieces(self, cache: LayerCache, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of neighbouring places from one position to another: the first position,
        its place, and the number of tokens."""
        # A ring is shorter than its width, which is a whole number of octets.
        width = self.past[cache.kind].most if cache.kind == "full" else self._ring
        while begin < end:
            place = self._place(cache.kind, begin)
            size = min(end - begin, width - place)
            yield begin, place, size
            begin += size

    def _held(self, cache: LayerCache, base: int, row: DeviceRow, place: int) -> Pitched:
        address = self._at(cache, base, row) + place * cache.token
        return Pitched(address, self.width(cache.kind, row) * cache.token)

    def make_room(self, row: DeviceRow, count: int) -> None:
        """Give a request's caches the least width for `count` more tokens."""
        self.fit(row, round_up(row.length + count, self.widths))

    def fit(self, row: DeviceRow, width: int) -> None:
        """Give a request's caches a width, which is not less than its tokens."""
        if width == row.width:
            return
        before, row.width = row.width, width
        for layer in (each for each in self._layers if each.kind == "full"):
            for base in (layer.keys, layer.values):
                self._restride(layer, base, row, before)

    def width(self, kind: str, row: DeviceRow) -> int:
        """Return the tokens that a request's layers of a kind have room for."""
        return row.width if kind == "full" else self.past[kind].most

    def key(self, layer: int, slot: int) -> int:
        """Return the address of a layer's keys from `slot` on."""
        cache = self._layers[layer]
        return cache.keys + slot * self._stride(cache)

    def value(self, layer: int, slot: int) -> int:
        """Return the address of a layer's values from `slot` on."""
        cache = self._layers[layer]
        return cache.values + slot * self._stride(cache)

    def positions(self, kind: str, slot: int) -> int:
        """Return the address of the positions of the tokens that layers of a kind hold, from `slot` on."""
        past = self.past[kind]
        return past.positions + 8 * slot * past.most

    def show_positions(self, first: int, batch: int) -> None:
        """Write the positions of the cached tokens in a pass's slots, unless they are there
        already."""
        for slot in range(first, first + batch):
            row = self.row(slot)
            length = row.length if row else 0
            for kind, past in self.past.items():
                width = self.width(kind, row) if row else past.most
                if past.shown[slot] == (width, length):
                    continue
                places = np.full(width, -1, np.int64)
                held = np.arange(length - self._kept(kind, length), length)
                places[held if kind == "full" else held % self._ring] = held
                self._device.upload(self.positions(kind, slot), places)
                past.shown[slot] = (width, length)

    def _stride(self, layer: LayerCache) -> int:
        return layer.heads * self.past[layer.kind].most * layer.token

    def _at(self, layer: LayerCache, base: int, row: DeviceRow) -> int:
        assert row.kv_slot is not None
        return base + row.kv_slot * self._stride(layer)

    def _kept(self, kind: str, length: int) -> int:
        return length if kind == "full" else min(length, self._ring)

    def _place(self, kind: str, position: int) -> int:
        return position if kind == "full" else position % self._ring

    def _restride(self, layer: LayerCache, base: int, row: DeviceRow, before: int) -> None:
        """Move a request's keys or values to its new width, in place."""
        kept = min(before, row.width) * layer.token
        source = Pitched(self._at(layer, base, row), before * layer.token)
        to = Pitched(self._at(layer, base, row), row.width * layer.token)
        # The old and the new place overlap.
        self._device.copy(Pitched(self._scratch, kept), source, kept, layer.heads)
        self._device.copy(to, Pitched(self._scratch, kept), kept, layer.heads)
