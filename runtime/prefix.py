"""Encodes the shared beginnings of prompts once: keys and values of their chunks, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from canvasrt.runtime.model import Model, Row, Saved
from canvasrt.runtime.pictures import uncut

FIRST = 128  # tokens of a prompt's first chunk
# How the names of callers begin that share what is kept: those without a key, each of which is named by its request.
ANYBODY = "~"


class Chunk(NamedTuple):
    """Part of a prompt that is encoded in one pass. Its key also stands for all tokens before it."""

    size: int
    key: bytes


def share_of(owner: str) -> str:
    """Return the name under which a caller's prompts are kept: nobody else may learn from the cache
    what was asked under a key."""
    return "" if owner.startswith(ANYBODY) else owner


def chunks_of(
    tokens: np.ndarray, most: int, groups: np.ndarray | None = None, digests: Sequence[bytes] = ()
) -> list[Chunk]:
    """Cut a prompt into the chunks that it is encoded in, of at most `most` tokens.

    The last bits of keys and values depend on the pass that computed them. So chunks end at fixed
    positions, whatever follows: 128, 256, 512 and so on up to `most`, then at every multiple of it.
    Prompts with the same beginning share chunks, and a saved chunk is what its own pass would give.

    An image's tokens see each other, so none is cut (`pictures.uncut`): `groups` `[tokens]` has the
    image's number for each of its tokens, and -1 for text. Its place in `digests` tells it from
    others.
    """
    groups = np.full(len(tokens), -1) if groups is None else groups
    found: list[Chunk] = []
    key, begin = b"", 0
    while begin < len(tokens):
        size = uncut(groups[begin:], _next_end(begin, most) - begin, most)
        end = begin + size
        images = np.unique(groups[begin:end]) if digests else ()
        seen = b"".join(digests[number] for number in images if number >= 0)
        text = np.ascontiguousarray(tokens[begin:end], "<i8").tobytes()
        key = hashlib.sha256(key + text + seen).digest()
        found.append(Chunk(size, key))
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
    """Saved chunks of prompts, the least recently used dropped first. Not thread-safe.

    model: computes the chunks and keeps them where it keeps its caches.
    limit: bytes that they may take. A device takes them at once, or less if it has less.
    """

    def __init__(self, model: Model, limit: int) -> None:
        self._model = model
        self._left = model.reserve(limit)
        self._saved: OrderedDict[tuple[str, bytes], Saved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._saved)

    def fill(self, row: Row, chunks: Sequence[Chunk], owner: str = "") -> int:
        """Add to a row the leading `chunks` that are saved for its owner; return how many they are."""
        keys = [(share_of(owner), chunk.key) for chunk in chunks]
        count = next((i for i, key in enumerate(keys) if key not in self._saved), len(keys))
        if count:
            self._model.restore(row, [self._saved[key] for key in keys[:count]])
        # A chunk is of no use without those before it, so those are used last.
        for key in reversed(keys[:count]):
            self._saved.move_to_end(key)
        return count

    def add(self, row: Row, chunk: Chunk, owner: str = "") -> None:
        """Save the last chunk of a row, which is encoded, for its owner, unless it takes more than
        the limit."""
        need = self._model.saved_bytes(chunk.size)
        key = (share_of(owner), chunk.key)
        if key in self._saved:
            return
        while self._left < need and self._saved:
            self._drop()
        if self._left >= need:
            self._saved[key] = self._model.save(row, chunk.size)
            self._left -= need

    def clear(self) -> None:
        """Drop everything."""
        while self._saved:
            self._drop()

    def _drop(self) -> None:
        _, saved = self._saved.popitem(last=False)
        self._model.forget(saved)
        self._left += self._model.saved_bytes(saved.tokens)
