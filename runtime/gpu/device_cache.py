"""The KV caches of all requests in device memory. Passes read and extend them in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.pass_shapes import round_up
from canvasrt.runtime.engine import Device, Pitched

ALIGNMENT = 256  # TensorRT's requirement for addresses


def aligned(size: int) -> int:
    """Round `size` up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class DeviceRow:
    """The state of one request on the device. The request gets a kv slot when it first needs one."""

    kv_slot: int | None = None
    length: int = 0  # clean tokens in the cache
    width: int = 0  # current capacity of the request's caches in full layers, in tokens
    # Serial number of the newest hidden states, from 1. None if the device has no hidden states of the request.
    hidden: int | None = None
    # Slots per expert that a block needs after an overload. Keys: the number of tokens cached before the block, and the
    # number of the body segment.
    needs: dict[tuple[int, int], int] = field(default_factory=dict)

    def need(self, segment: int) -> int:
        """Return the slots per expert that a segment needs in the current block; 0 if no expert was overloaded so
        far."""
        return self.needs.get((self.length, segment), 0)

    def overload(self, segment: int, slots: int) -> None:
        """Set the slots per expert that a segment needs until the block ends, even if the request is parked
        meanwhile."""
        self.needs[self.length, segment] = slots


@dataclass(frozen=True)
class Resident:
    """A handle to a canvas's hidden states on the device. `number` distinguishes a row's newest states from older
    ones."""

    row: DeviceRow
    number: int
    length: int  # number of positions


@dataclass(frozen=True)
class LayerCache:
    """Addresses of one layer's keys and values, both `[slots, kv_heads, most, head_dim]`. `token`: bytes per token and
    head.

    A request fills its slot from the beginning, as `[kv_heads, width, head_dim]`. The rest of the slot is unused.
    """

    kind: str
    heads: int
    token: int
    keys: int
    values: int


@dataclass
class Past:
    """Data that all layers of one kind (sliding or full) share."""

    most: int  # capacity of a slot in tokens
    positions: int  # address of int64 `[slots, most]`
    shown: list[
        tuple[int, int]
    ]  # for each slot, the width and length for which its positions were last written


class DeviceCache:
    """The requests' kv slots, which hold every layer's keys and values.

    In full layers every request has its own width, so that its passes do not depend on other requests. A slot's
    addresses never change. A sliding layer's part is a ring buffer of constant width. The order of cached tokens does
    not matter, because every token has a position. Empty places have position −1. Memory is zeroed at first, because
    masked values are multiplied by zero, and zero times NaN is NaN.
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
        """Allocate all memory.

        most: for each kind of layer, the maximum tokens per slot. widths: possible widths in full layers, ascending;
        the last is `most["full"]`. Raises CanvasError if slots would not start at aligned addresses.
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
        """Return the request in a slot, or None if the slot is free."""
        held = self._rows[slot]
        row = held() if held else None
        return row if row is not None and row.kv_slot == slot else None

    def take(self, row: DeviceRow) -> None:
        """Assign the first free slot to a request that has none."""
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
        """Free a request's slot, and reset the request's state on the device."""
        if row.kv_slot is not None:
            self._rows[row.kv_slot] = None
        row.kv_slot, row.length, row.hidden = None, 0, None
        row.needs.clear()

    def append(
        self, row: DeviceRow, layer: int, keys: int, values: int, length: int, count: int
    ) -> None:
        """Append `count` tokens to one layer. The tokens' keys and values are at the addresses `keys` and `values`,
        both `[kv_heads, length, head_dim]`.

        Call `make_room` before the first layer, and update the row's `length` after the last.
        """
        after = row.length + count
        begin = after - self._kept(self._layers[layer].kind, count)
        for cached, other, width, heads in self._copies(
            row, layer, (keys, values), length, row.length, (begin, after)
        ):
            self._device.copy(cached, other, width, heads)

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
        """Copy one layer's keys and values of `count` tokens, from position `begin` on, to the addresses `keys` and
        `values`, in the layout of `append`. Tokens that are no longer cached are left out."""
        oldest = row.length - self._kept(self._layers[layer].kind, row.length)
        for cached, other, width, heads in self._copies(
            row, layer, (keys, values), length, begin, (max(begin, oldest), begin + count)
        ):
            self._device.copy(other, cached, width, heads)

    def keeps(self, layer: int, position: int, length: int) -> bool:
        """Return whether a layer still has the token at `position` when the request has `length` clean tokens."""
        return position >= length - self._kept(self._layers[layer].kind, length)

    @property
    def token_sizes(self) -> list[int]:
        """The size of one token's keys in bytes, by layer. The token's values have the same size."""
        return [layer.heads * layer.token for layer in self._layers]

    def _copies(
        self,
        row: DeviceRow,
        layer: int,
        others: tuple[int, int],
        length: int,
        first: int,
        span: tuple[int, int],
    ) -> Iterator[tuple[Pitched, Pitched, int, int]]:
        """Yield the copies between the cache and other memory for the tokens in `span`, the first position and the
        end. Each copy has the address in the cache, the address in the other memory, the bytes per head, and the number
        of heads. A copy's tokens are contiguous in the cache. The other memory, at the addresses `others`, has the
        layout of `append`, and begins with the token at position `first`."""
        cache, (begin, end) = self._layers[layer], span
        # A sliding layer's ring can be shorter than the layer's width, which is a multiple of 8.
        width = self.past[cache.kind].most if cache.kind == "full" else self._ring
        pitch = self.width(cache.kind, row) * cache.token
        while begin < end:
            place = begin % width
            size = min(end - begin, width - place)
            for base, other in zip((cache.keys, cache.values), others, strict=True):
                cached = Pitched(self._at(cache, base, row) + place * cache.token, pitch)
                at = Pitched(other + (begin - first) * cache.token, length * cache.token)
                yield cached, at, size * cache.token, cache.heads
            begin += size

    def make_room(self, row: DeviceRow, count: int) -> None:
        """Set a request's width to the smallest one that holds `count` more tokens."""
        self.fit(row, round_up(row.length + count, self.widths))

    def fit(self, row: DeviceRow, width: int) -> None:
        """Set a request's width, which must not be less than its number of tokens."""
        if width == row.width:
            return
        before, row.width = row.width, width
        for layer in (each for each in self._layers if each.kind == "full"):
            for base in (layer.keys, layer.values):
                self._restride(layer, base, row, before)

    def width(self, kind: str, row: DeviceRow) -> int:
        """Return the width of a request's caches in layers of a kind."""
        return row.width if kind == "full" else self.past[kind].most

    def key(self, layer: int, slot: int) -> int:
        """Return the address of a slot's keys in a layer."""
        cache = self._layers[layer]
        return cache.keys + slot * self._stride(cache)

    def value(self, layer: int, slot: int) -> int:
        """Return the address of a slot's values in a layer."""
        cache = self._layers[layer]
        return cache.values + slot * self._stride(cache)

    def positions(self, kind: str, slot: int) -> int:
        """Return the address of a slot's token positions for layers of a kind."""
        past = self.past[kind]
        return past.positions + 8 * slot * past.most

    def show_positions(self, first: int, batch: int) -> None:
        """Upload the positions of the cached tokens in a pass's slots, unless they are up to date."""
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

    def _restride(self, layer: LayerCache, base: int, row: DeviceRow, before: int) -> None:
        """Rearrange a request's keys or values in place, for its new width."""
        kept = min(before, row.width) * layer.token
        source = Pitched(self._at(layer, base, row), before * layer.token)
        to = Pitched(self._at(layer, base, row), row.width * layer.token)
        # Copy through scratch memory, because source and destination overlap.
        self._device.copy(Pitched(self._scratch, kept), source, kept, layer.heads)
        self._device.copy(to, Pitched(self._scratch, kept), kept, layer.heads)
