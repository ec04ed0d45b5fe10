"""Device memory for saved chunks of prompts: pages of a fixed number of tokens, taken once."""

from __future__ import annotations

from collections.abc import Sequence

from canvasrt.errors import CanvasError
from canvasrt.runtime.engine import Device
from canvasrt.runtime.gpu.device_cache import DeviceCache, DeviceRow, aligned

PAGE = 64  # tokens
# Bytes that stay free on the device: captures, and what its driver loads late.
HEADROOM = 512 << 20


class Pages:
    """Pages that hold every layer's keys and values, `[kv_heads, PAGE, head_dim]` each."""

    def __init__(self, device: Device, cache: DeviceCache, limit: int) -> None:
        """Take at most `limit` bytes; less if the device does not have them."""
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
        """The bytes of all free pages."""
        return len(self._free) * self.size

    def save(self, row: DeviceRow, tokens: int) -> list[int]:
        """Copy the last `tokens` tokens of a row to free pages; return them. There must be enough."""
        pages = [self._free.pop() for _ in range(_count(tokens))]
        begin = row.length - tokens
        for number, page in enumerate(pages):
            done = number * PAGE
            for layer, (keys, values) in enumerate(self._addresses(page)):
                count = min(PAGE, tokens - done)
                self._cache.extract(row, layer, keys, values, PAGE, begin + done, count)
        return pages

    def restore(self, row: DeviceRow, saved: Sequence[tuple[list[int], int]]) -> None:
        """Append chunks to a row: their pages, and how many tokens those hold."""
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
        """Give pages back."""
        self._free += pages

    def saved_bytes(self, tokens: int) -> int:
        """Return the bytes of the pages for a chunk of that many tokens."""
        return _count(tokens) * self.size

    def _addresses(self, page: int) -> list[tuple[int, int]]:
        base = self._base + page * self.size
        return [(base + keys, base + values) for keys, values in self._offsets]


def _count(tokens: int) -> int:
    return -(-tokens // PAGE)
