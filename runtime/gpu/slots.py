"""The key-value caches of all requests in device memory; passes read and extend them in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.capacity import Capacity
from canvasrt.runtime.engine import Device, Pitched
from canvasrt.runtime.gpu.buffers import ALIGNMENT

# The smallest width of a past, and its unit: shapes stay few.
QUANTUM = 256


@dataclass(eq=False)
class DeviceRow:
    """What a model keeps for one request: a slot of the device's caches, taken with its first
    tokens."""

    slot: int | None = None
    length: int = 0  # clean tokens in the cache
    # Counts the hidden states that the device computed for the request; None if it holds none.
    hidden: int | None = None
    capacities: dict[tuple[str, str], Capacity] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerCache:
    """One layer's caches: keys and values, each `[slots, kv_heads, width, head_dim]`. Sizes are in
    bytes."""

    kind: str
    heads: int
    token: int
    keys: int
    values: int


@dataclass
class Past:
    """What layers of one kind share: how many tokens fit in a slot now, and at most."""

    width: int
    most: int
    positions: int  # address of int64 `[slots, most]`; a pass fills `[batch, width]`
    shown: tuple[int, ...] = ()  # the widths and lengths they were written for


def bucket(tokens: int, most: int) -> int:
    """Return a width for `tokens`: at most a quarter or `QUANTUM` above, and never above `most`."""
    step = max(QUANTUM, 1 << max(0, tokens.bit_length() - 3))
    return min(most, -(-max(tokens, 1) // step) * step)


class DeviceCache:
    """One slot per request; each slot holds every layer's keys and values.

    All slots have the same width per kind of layer, so neighbouring slots form a batch without
    copying. Empty places have position -1. A sliding layer keeps its last `sliding_window - 1`
    tokens in a ring: the order of cached tokens does not matter, since each carries its position.
    Memory starts as zeros, because masked keys still take part, with weight zero.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        slots: int,
        most: dict[str, int],
        itemsizes: Sequence[int],
    ) -> None:
        """Allocate the caches. `most`: the widest past per kind; `itemsizes`: bytes per cached
        number, per layer."""
        self._device = device
        self._ring = config.sliding_window - 1
        self._rows: list[weakref.ref[DeviceRow] | None] = [None] * slots
        self.past = {
            kind: Past(bucket(0, width), width, device.allocate(8 * slots * width))
            for kind, width in most.items()
            if any(layer.kind == kind for layer in config.layers)
        }
        sizes = [
            self._size(layer, item) for layer, item in zip(config.layers, itemsizes, strict=True)
        ]
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
        # A pass can begin at any slot only if every slot begins at an aligned address.
        self.aligned = all(size % ALIGNMENT == 0 for size in sizes)

    def _size(self, layer: Layer, itemsize: int) -> int:
        return layer.num_kv_heads * self.past[layer.kind].most * layer.head_dim * itemsize

    @property
    def slots(self) -> int:
        return len(self._rows)

    def row(self, slot: int) -> DeviceRow | None:
        """Return the request in a slot, or None if it is free."""
        held = self._rows[slot]
        row = held() if held else None
        return row if row is not None and row.slot == slot else None

    def rows(self) -> list[DeviceRow]:
        """Return the requests that have a slot, in slot order."""
        return [row for slot in range(self.slots) if (row := self.row(slot))]

    def take(self, row: DeviceRow) -> None:
        """Give a request the first free slot."""
        if row.slot is not None:
            return
        free = next((slot for slot in range(self.slots) if self.row(slot) is None), None)
        if free is None:
            raise CanvasError(
                f"all {self.slots} request slots are taken",
                "run fewer requests together, or build with a larger --max-batch",
            )
        row.slot = free
        self._rows[free] = weakref.ref(row)

    def release(self, row: DeviceRow) -> None:
        """Free a request's slot and forget its contents."""
        if row.slot is not None:
            self._rows[row.slot] = None
        row.slot, row.length, row.hidden = None, 0, None

    def compact(self) -> list[tuple[int, int]]:
        """Move requests down into free slots, so that fewer passes take them all. Return the moves."""
        moves = []
        for to, row in enumerate(self.rows()):
            source = row.slot
            assert source is not None
            if source == to:
                continue
            for layer in self._layers:
                size = self._stride(layer)
                for base in (layer.keys, layer.values):
                    self._copy(base + to * size, base + source * size, size)
            self._rows[to], self._rows[source], row.slot = self._rows[source], None, to
            moves.append((source, to))
        return moves

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
        """Copy one layer's tokens from position `begin` on, as far as it still has them, to where
        `append` reads them."""
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
        # A ring ends before a width of whole octets does.
        width = self.past[cache.kind].width
        width = width if cache.kind == "full" else min(width, self._ring)
        while begin < end:
            place = self._place(cache.kind, begin)
            size = min(end - begin, width - place)
            yield begin, place, size
            begin += size

    def _held(self, cache: LayerCache, base: int, row: DeviceRow, place: int) -> Pitched:
        address = self._at(cache, base, row) + place * cache.token
        return Pitched(address, self.past[cache.kind].width * cache.token)

    def make_room(self, rows: Sequence[DeviceRow], counts: Sequence[int]) -> None:
        """Widen the caches if they are too narrow for `counts` more tokens of `rows`."""
        for kind, past in self.past.items():
            held = [self._kept(kind, row.length + n) for row, n in zip(rows, counts, strict=True)]
            if max(held) > past.width:
                self._set_width(kind, bucket(max(held), past.most))

    def narrow(self) -> None:
        """Shrink widths that no request needs any more, if that halves what a pass reads."""
        for kind, past in self.past.items():
            held = max((self._kept(kind, row.length) for row in self.rows()), default=0)
            if bucket(held, past.most) <= past.width // 2:
                self._set_width(kind, bucket(held, past.most))

    def key(self, layer: int, slot: int) -> int:
        """Return the address of a layer's keys from `slot` on."""
        cache = self._layers[layer]
        return cache.keys + slot * self._stride(cache)

    def value(self, layer: int, slot: int) -> int:
        """Return the address of a layer's values from `slot` on."""
        cache = self._layers[layer]
        return cache.values + slot * self._stride(cache)

    def show_positions(self, first: int, batch: int) -> None:
        """Write the positions of the cached tokens in a pass's slots, unless they are there
        already."""
        rows = [self.row(slot) for slot in range(first, first + batch)]
        lengths = [row.length if row else 0 for row in rows]
        for kind, past in self.past.items():
            shown = (past.width, *lengths)
            if shown == past.shown:
                continue
            places = np.full((batch, past.width), -1, np.int64)
            for index, length in enumerate(lengths):
                held = np.arange(length - self._kept(kind, length), length)
                places[index, held if kind == "full" else held % self._ring] = held
            self._device.upload(past.positions, places)
            past.shown = shown

    def _stride(self, layer: LayerCache) -> int:
        return layer.heads * self.past[layer.kind].width * layer.token

    def _at(self, layer: LayerCache, base: int, row: DeviceRow) -> int:
        assert row.slot is not None
        return base + row.slot * self._stride(layer)

    def _kept(self, kind: str, length: int) -> int:
        return length if kind == "full" else min(length, self._ring)

    def _place(self, kind: str, position: int) -> int:
        return position if kind == "full" else position % self._ring

    def _copy(self, to: int, source: int, size: int) -> None:
        self._device.copy(Pitched(to, size), Pitched(source, size), size, 1)

    def _set_width(self, kind: str, width: int) -> None:
        """Move every request's keys and values to a new width, in place."""
        past = self.past[kind]
        before, past.width = past.width, width
        rows = self.rows()
        for layer in (each for each in self._layers if each.kind == kind):
            # When widening, the last slot moves first, so none is overwritten before it has moved.
            for row in rows[::-1] if width > before else rows:
                for base in (layer.keys, layer.values):
                    self._restride(layer, base, row, before)

    def _restride(self, layer: LayerCache, base: int, row: DeviceRow, before: int) -> None:
        assert row.slot is not None
        width = self.past[layer.kind].width
        kept = min(before, width) * layer.token
        source = Pitched(base + row.slot * layer.heads * before * layer.token, before * layer.token)
        to = Pitched(base + row.slot * layer.heads * width * layer.token, width * layer.token)
        # A slot's old and new place overlap.
        self._device.copy(Pitched(self._scratch, kept), source, kept, layer.heads)
        self._device.copy(to, Pitched(self._scratch, kept), kept, layer.heads)
