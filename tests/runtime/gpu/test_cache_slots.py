"""Every slot of the device's caches holds the same tokens as a host cache."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.gpu.device_cache import DeviceCache, DeviceRow
from canvasrt.runtime.kv_cache import RequestCache
from tests.helpers.configs import CONFIG, LAYERS
from tests.helpers.fake_engine import FakeDevice

MOST = {"sliding": 64, "full": 2048}
WIDTHS = (256, 1024, 2048)


class Both:
    """A device's cache, and a host cache for every request in it."""

    def __init__(self, slots: int = 3) -> None:
        self.device = FakeDevice()
        self.cache = DeviceCache(self.device, CONFIG, slots, MOST, [4] * len(LAYERS), WIDTHS)
        self.host: dict[DeviceRow, RequestCache] = {}

    def start(self) -> DeviceRow:
        row = DeviceRow()
        self.cache.take(row)
        self.host[row] = RequestCache(CONFIG)
        return row

    def end(self, row: DeviceRow) -> None:
        del self.host[row]
        self.cache.release(row)

    def append(self, row: DeviceRow, count: int) -> None:
        """Append new, different tokens as a pass returns them, followed by some padding."""
        length, host = count + 2, self.host[row]
        self.cache.make_room(row, count)
        for index, layer in enumerate(LAYERS):
            shape = (2, 1, layer.num_kv_heads, length, layer.head_dim)
            both = np.random.default_rng(row.length + index).random(shape, np.float32)
            addresses = []
            for part in both:
                addresses.append(self.device.allocate(part.nbytes))
                self.device.upload(addresses[-1], part)
            self.cache.append(row, index, *addresses, length, count)
            host.append(index, both[0][:, :, :count], both[1][:, :, :count])
        row.length += count
        host.advance(count)
        self.device.synchronize()

    def check(self) -> None:
        """Compare the cached tokens of every request, in the order of positions."""
        for row, host in self.host.items():
            assert row.kv_slot is not None
            self.cache.show_positions(row.kv_slot, 1)
            self.device.synchronize()
            saved = host.save(host.length)
            for index, (layer, (keys, values)) in enumerate(zip(LAYERS, saved, strict=True)):
                width = self.cache.width(layer.kind, row)
                at = self.cache.positions(layer.kind, row.kv_slot)
                positions = self.read(at, (width,), np.int64)
                order = np.argsort(positions)[(positions < 0).sum() :]
                assert positions[order].tolist() == host.positions(layer.kind).tolist()
                shape = (layer.num_kv_heads, width, layer.head_dim)
                for address, expected in (
                    (self.cache.key(index, row.kv_slot), keys),
                    (self.cache.value(index, row.kv_slot), values),
                ):
                    found = self.read(address, shape, np.float32)[:, order]
                    assert np.array_equal(found, expected[0])

    def read(self, address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        array = np.empty(shape, dtype)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        return array


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_grow_and_go(seed: int) -> None:
    random = np.random.default_rng(seed)
    both, rows = Both(), []
    for _ in range(40):
        choice = random.random()
        if len(rows) < 3 and (choice < 0.3 or not rows):
            rows.append(both.start())
        elif choice < 0.45:
            both.end(rows.pop(random.integers(len(rows))))
        else:
            row = rows[random.integers(len(rows))]
            count = int(random.integers(1, 300))
            if row.length + count <= MOST["full"]:
                both.append(row, count)
        both.check()


def test_a_request_s_place_and_width_do_not_depend_on_others() -> None:
    both = Both()
    first, second = both.start(), both.start()
    at = both.cache.key(1, 1), both.cache.positions("full", 1)
    both.append(second, 10)
    both.append(first, 1500)
    assert (first.width, second.width) == (2048, 256)
    both.end(first)
    assert second.kv_slot == 1
    assert (both.cache.key(1, 1), both.cache.positions("full", 1)) == at
    both.check()


def test_caches_that_are_not_aligned_are_refused() -> None:
    with pytest.raises(CanvasError, match="caches of 5 and 2048 tokens"):
        DeviceCache(FakeDevice(), CONFIG, 1, MOST | {"sliding": 5}, [4] * len(LAYERS), WIDTHS)


def test_a_slot_whose_request_is_gone_is_free() -> None:
    both = Both(slots=1)
    row = both.start()
    both.host.clear()
    del row
    assert both.start().kv_slot == 0
