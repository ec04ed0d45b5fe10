"""Device memory for saved chunks of prompts: pages of a fixed number of tokens, allocated once."""

from __future__ import annotations

from collections.abc import Sequence

from canvasrt.errors import CanvasError
from canvasrt.runtime.engine import Device
from canvasrt.runtime.gpu.device_cache import DeviceCache, DeviceRow, aligned

PAGE = 64  # tokens
# Bytes to leave free on the device for captured graphs and modules that the driver loads lazily.
HEADROOM = 512 << 20


class Pages:
    """Pages, each of which holds every layer's keys and values, both `[kv_heads, PAGE, head_dim]`."""

    def __init__(self, device: Device, cache: DeviceCache, limit: int) -> None:
        """Allocate as many pages as fit `limit` bytes, or fewer if the device has less free memory."""
        self._cache = cache
        self._offsets: list[tuple[int, int]] = []
        end = 0
        for size in cache.token_sizes:
            each = aligned(PAGE * size)
            self._offsets.append((end, end + each))
            end += 2 * each
        self.size = end
        count = max(0, min(limit, device.memory()[0] - HEADROOM)) // end
        while count:
            try:
                self._base = device.allocate(count * end)
                break
            except CanvasError:
                count //= 2
        self._free = list(range(count))[::-1]

    @property
    def bytes(self) -> int:
        """The total size of the free pages, in bytes."""
        return len(self._free) * self.size

    def save(self, row: DeviceRow, tokens: int) -> list[int]:
        """Copy the last `tokens` tokens of a row to free pages, and return the pages. Enough pages must be free."""
        pages = [self._free.pop() for _ in range(_count(tokens))]
        begin = row.length - tokens
        for number, page in enumerate(pages):
            done = number * PAGE
            for layer, (keys, values) in enumerate(self._addresses(page)):
                count = min(PAGE, tokens - done)
                self._cache.extract(row, layer, keys, values, PAGE, begin + done, count)
        return pages

    def restore(self, row: DeviceRow, saved: Sequence[tuple[list[int], int]]) -> None:
        """Append saved chunks to a row. Each chunk consists of its pages and its number of tokens."""
        end = row.length + sum(tokens for _, tokens in saved)
        self._cache.make_room(row, end - row.length)
        for pages, tokens in saved:
            for number, page in enumerate(pages):
                count = min(PAGE, tokens - number * PAGE)
                for layer, (keys, values) in enumerate(self._addresses(page)):
                    if self._cache.keeps(layer, row.length + count - 1, end):
                        self._cache.append(row, layer, keys, values, PAGE, count)
                row.length += count
        row.hidden = None

    def free(self, pages: Sequence[int]) -> None:
        """Mark pages as free."""
        self._free += pages

    def saved_bytes(self, tokens: int) -> int:
        """Return the size of the pages that hold a chunk of `tokens` tokens, in bytes."""
        return _count(tokens) * self.size

    def _addresses(self, page: int) -> list[tuple[int, int]]:
        base = self._base + page * self.size
        return [(base + keys, base + values) for keys, values in self._offsets]


def _count(tokens: int) -> int:
    return -(-tokens // PAGE)
