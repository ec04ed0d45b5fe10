"""The prefix cache: keys and values of prompts' chunks, in bounded memory, so that common prefixes are encoded once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import Row, Saved
from canvasrt.runtime.pictures import uncut

FIRST = 128  # number of tokens in a prompt's first chunk
# The names of callers without an API key begin with this. Every request of such a caller has a new name, but all of
# these names share one cache.
ANYBODY = "~"


class Chunk(NamedTuple):
    """Tokens that are encoded in one pass."""

    tokens: np.ndarray  # int64 [n]
    key: bytes = b""  # identifies the prefix that ends with this chunk
    groups: np.ndarray | None = None  # int64 [n], as in EncodeInput
    keep: Callable[[np.ndarray], bool] | None = None  # as in EncodeInput
    whole: bool = False  # as in EncodeInput

    @property
    def size(self) -> int:
        return len(self.tokens)


def share_of(owner: str) -> str:
    """Return the name under which a caller's prompts are cached. Every API key has its own name, so that callers cannot
    probe each other's prompts."""
    return "" if owner.startswith(ANYBODY) else owner


def chunks_of(
    tokens: np.ndarray, most: int, groups: np.ndarray | None = None, digests: Sequence[bytes] = ()
) -> list[Chunk]:
    """Cut a prompt into chunks of at most `most` tokens.

    The last bits of keys and values depend on the pass's other tokens. So chunks end at fixed positions, independent of
    the tokens after them: 128, 256, 512 and so on up to `most`, then every multiple of `most`. Prompts with the same
    prefix then have the same chunks, and a saved chunk equals what the request's own pass would compute.

    An image's tokens attend to each other, so images are not cut (`pictures.uncut`). `groups` `[tokens]` holds every
    token's image number, or -1 for text; `digests` identify the images.
    """
    of_text = np.full(len(tokens), -1) if groups is None else groups
    found: list[Chunk] = []
    key, begin = b"", 0
    while begin < len(tokens):
        size = uncut(of_text[begin:], _next_end(begin, most) - begin, most)
        end = begin + size
        images = np.unique(of_text[begin:end]) if digests else ()
        seen = b"".join(digests[number] for number in images if number >= 0)
        text = np.ascontiguousarray(tokens[begin:end], "<i8").tobytes()
        key = hashlib.sha256(key + text + seen).digest()
        part = None if groups is None else groups[begin:end]
        found.append(Chunk(tokens[begin:end], key, part))
        begin = end
    return found


def _next_end(position: int, most: int) -> int:
    if position >= most:
        return (position // most + 1) * most
    end = min(FIRST, most)
    while end <= position:
        end *= 2
    return min(end, most)


class PrefixCache:
    """Saved chunks of prompts. When memory is full, the least recently used chunks are dropped. Not thread-safe.

    model: saves and restores chunks in its own memory. limit: maximum size of all chunks together, in bytes. A device
    reserves this memory at load; if less is free, the limit is lower.
    """

    def __init__(self, model: Model, limit: int) -> None:
        self._model = model
        self._limit = self._left = model.reserve(limit)
        self._saved: OrderedDict[tuple[str, bytes], Saved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._saved)

    def fill(self, row: Row, chunks: Sequence[Chunk], owner: str = "") -> int:
        """Append saved chunks to a request's cache, from the beginning of `chunks` up to the first chunk that is not
        saved for `owner`. Return the number of appended chunks."""
        keys = [(share_of(owner), chunk.key) for chunk in chunks]
        count = next((i for i, key in enumerate(keys) if key not in self._saved), len(keys))
        if count:
            self._model.restore(row, [self._saved[key] for key in keys[:count]])
        # A chunk is useless without its predecessors, so the predecessors are marked as more recently used.
        for key in reversed(keys[:count]):
            self._saved.move_to_end(key)
        return count

    def add(self, row: Row, chunk: Chunk, owner: str = "") -> None:
        """Save a request's last encoded chunk for its owner, unless the chunk exceeds the limit."""
        need = self._model.saved_bytes(chunk.size)
        key = (share_of(owner), chunk.key)
        if key in self._saved or need > self._limit:
            return
        while self._left < need:
            self._drop()
        self._saved[key] = self._model.save(row, chunk.size)
        self._left -= need

    def clear(self) -> None:
        """Drop all chunks."""
        while self._saved:
            self._drop()

    def _drop(self) -> None:
        _, saved = self._saved.popitem(last=False)
        self._model.forget(saved)
        self._left += self._model.saved_bytes(saved.tokens)
