"""The key-value caches of all requests in a device's memory, where passes read and extend them in place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.capacity import Capacity
from canvasrt.runtime.engine import Device, Pitched
from canvasrt.runtime.gpu.buffers import ALIGNMENT

# The least width of a past, and what widths are multiples of: few shapes occur then.
QUANTUM = 256


@dataclass(eq=False)
class DeviceRow:
    """What a model keeps for one request: a slot of its device's caches, taken with the first tokens."""

    slot: int | None = None
    length: int = 0  # clean tokens in the cache
    # Counts the hidden states that the device holds for the request; None when it holds none.
    hidden: int | None = None
    capacities: dict[tuple[str, str], Capacity] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerCache:
    """One layer's part: keys and values, each `[slots, kv_heads, width, head_dim]`; sizes in bytes."""

    kind: str
    heads: int
    token: int
    keys: int
    values: int


@dataclass
class Past:
    """What layers of one kind share: how many tokens a slot has room for now, and at most."""

    width: int
    most: int
    positions: int  # the address of int64 `[slots, most]`, of which a pass fills `[batch, width]`
    shown: tuple[int, ...] = ()  # what those were written for


def bucket(tokens: int, most: int) -> int:
    """A width that holds `tokens`, at most a quarter above them or `QUANTUM`; never above `most`."""
    step = max(QUANTUM, 1 << max(0, tokens.bit_length() - 3))
    return min(most, -(-max(tokens, 1) // step) * step)


class DeviceCache:
    """A slot a request, and in each slot every layer's keys and values.

    All slots have one width a kind of layer, so that neighbouring slots are a batch as they lie. Empty places have
    the position -1. A sliding layer keeps its last `sliding_window - 1` tokens in a ring: the order of the
    cached tokens does not matter, since each carries its position. Memory starts as zeros, and a masked
    key takes part with weight zero.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        slots: int,
        most: dict[str, int],
        itemsizes: Sequence[int],
    ) -> None:
        """most: the widest past of each kind; itemsizes: a layer, bytes of one cached number."""
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
        # Only where every slot begins at an aligned address can a pass begin at any slot.
        self.aligned = all(size % ALIGNMENT == 0 for size in sizes)

    def _size(self, layer: Layer, itemsize: int) -> int:
        return layer.num_kv_heads * self.past[layer.kind].most * layer.head_dim * itemsize

    @property
    def slots(self) -> int:
        return len(self._rows)

    def row(self, slot: int) -> DeviceRow | None:
        """The request in a slot; None when it is free."""
        held = self._rows[slot]
        row = held() if held else None
        return row if row is not None and row.slot == slot else None

    def rows(self) -> list[DeviceRow]:
        """The requests that have a slot, in the order of the slots."""
        return [row for slot in range(self.slots) if (row := self.row(slot))]

    def take(self, row: DeviceRow) -> None:
        """Gives a request a slot, the first that is free."""
        if row.slot is not None:
            return
        free = next((slot for slot in range(self.slots) if self.row(slot) is None), None)
        if free is None:
            raise CanvasError(
                f"all {self.slots} places for requests are taken",
                "run fewer requests together, or build with a larger --max-batch",
            )
        row.slot = free
        self._rows[free] = weakref.ref(row)

    def release(self, row: DeviceRow) -> None:
        """Frees a request's slot; what it held is forgotten."""
        if row.slot is not None:
            self._rows[row.slot] = None
        row.slot, row.length, row.hidden = None, 0, None

    def compact(self) -> list[tuple[int, int]]:
        """Moves requests down into free slots, so that few passes take them all; the moves made."""
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
        """Copies one layer's first `count` new tokens, `[kv_heads, length, head_dim]` at `keys` and `values`.

        `make_room` comes before the first layer; the last is followed by a new `length` of the row.
        """
        cache = self._layers[layer]
        kept = count if cache.kind == "full" else min(count, self._ring)
        done = count - kept
        # A ring ends before a width of whole octets does.
        end = self.past[cache.kind].width
        end = end if cache.kind == "full" else min(end, self._ring)
        while done < count:
            place = self._place(cache.kind, row.length + done)
            piece = min(count - done, end - place)
            for base, new in ((cache.keys, keys), (cache.values, values)):
                self._device.copy(
                    Pitched(
                        self._at(cache, base, row) + place * cache.token,
                        self.past[cache.kind].width * cache.token,
                    ),
                    Pitched(new + done * cache.token, length * cache.token),
                    piece * cache.token,
                    cache.heads,
                )
            done += piece

    def make_room(self, rows: Sequence[DeviceRow], counts: Sequence[int]) -> None:
        """Widens the caches, where they are too narrow for `counts` more tokens of `rows`."""
        for kind, past in self.past.items():
            held = [self._kept(kind, row.length + n) for row, n in zip(rows, counts, strict=True)]
            if max(held) > past.width:
                self._set_width(kind, bucket(max(held), past.most))

    def narrow(self) -> None:
        """Gives up width that no request needs any more, where that halves what a pass reads."""
        for kind, past in self.past.items():
            held = max((self._kept(kind, row.length) for row in self.rows()), default=0)
            if bucket(held, past.most) <= past.width // 2:
                self._set_width(kind, bucket(held, past.most))

    def key(self, layer: int, slot: int) -> int:
        """The address of a layer's keys from `slot` on."""
        cache = self._layers[layer]
        return cache.keys + slot * self._stride(cache)

    def value(self, layer: int, slot: int) -> int:
        """The address of a layer's values from `slot` on."""
        cache = self._layers[layer]
        return cache.values + slot * self._stride(cache)

    def show_positions(self, first: int, batch: int) -> None:
        """Writes the positions of the cached tokens of a pass's slots, where they are not there already."""
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
        """Moves every request's keys and values apart or together, in place."""
        past = self.past[kind]
        before, past.width = past.width, width
        rows = self.rows()
        for layer in (each for each in self._layers if each.kind == kind):
            # Wider: the last slot moves first, so that none is written over before it has moved.
            for row in rows[::-1] if width > before else rows:
                for base in (layer.keys, layer.values):
                    self._restride(layer, base, row, before)

    def _restride(self, layer: LayerCache, base: int, row: DeviceRow, before: int) -> None:
        assert row.slot is not None
        width = self.past[layer.kind].width
        kept = min(before, width) * layer.token
        source = Pitched(base + row.slot * layer.heads * before * layer.token, before * layer.token)
        to = Pitched(base + row.slot * layer.heads * width * layer.token, width * layer.token)
        # The old and the new place of a slot overlap.
        self._device.copy(Pitched(self._scratch, kept), source, kept, layer.heads)
        self._device.copy(to, Pitched(self._scratch, kept), kept, layer.heads)
