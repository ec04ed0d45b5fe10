"""Key-value caches, one per request, and the batches of pasts that a pass reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.runtime.body_inputs import past_in_octets
from canvasrt.runtime.engine import Arrays


class RequestCache:
    """Keys and values of one request's clean tokens, float32 `[1, kv_heads, kept, head_dim]` per
    layer.

    A sliding layer keeps the last `sliding_window - 1` tokens, a full layer all of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.length = 0
        self._window = config.sliding_window
        self._sliding = [layer.kind == "sliding" for layer in config.layers]
        empty = [
            np.zeros((1, layer.num_kv_heads, 0, layer.head_dim), np.float32)
            for layer in config.layers
        ]
        self.keys = list(empty)
        self.values = list(empty)

    def kept(self, kind: str) -> int:
        """Return how many tokens a layer of this kind holds."""
        return min(self.length, self._window - 1) if kind == "sliding" else self.length

    def positions(self, kind: str) -> np.ndarray:
        """Return the positions of those tokens, int64 `[kept]`."""
        return np.arange(self.length - self.kept(kind), self.length, dtype=np.int64)

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Add one layer's new tokens, `[1, kv_heads, n, head_dim]`; `advance` follows the last layer."""
        self.keys[layer] = self._joined(layer, self.keys[layer], keys)
        self.values[layer] = self._joined(layer, self.values[layer], values)

    def mark(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return what `rewind` needs to take back the tokens that are appended from now on."""
        return list(self.keys), list(self.values)

    def rewind(self, mark: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
        """Take back what was appended since `mark` was called, and not yet counted by `advance`."""
        self.keys, self.values = list(mark[0]), list(mark[1])

    def saved_bytes(self, count: int) -> int:
        """Return the bytes of the copy of that many tokens."""
        pairs = zip(self.keys, self._sliding, strict=True)
        sizes = [
            array.shape[1] * array.shape[3] * (min(count, self._window - 1) if sliding else count)
            for array, sliding in pairs
        ]
        return 2 * np.dtype(np.float32).itemsize * sum(sizes)

    def save(self, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return copies of every layer's keys and values of the last `count` tokens, as far as the
        layer keeps them."""

        def last(array: np.ndarray) -> np.ndarray:
            return array[:, :, max(0, array.shape[2] - count) :].copy()

        pairs = zip(self.keys, self.values, strict=True)
        return [(last(keys), last(values)) for keys, values in pairs]

    def restore(self, saved: Sequence[list[tuple[np.ndarray, np.ndarray]]], count: int) -> None:
        """Append copies that `save` returned, which hold `count` tokens together."""
        for layer in range(len(self.keys)):
            # A sliding layer's copies have gaps, but not within its last tokens.
            keys, values = zip(*(each[layer] for each in saved), strict=True)
            self.append(layer, np.concatenate(keys, axis=2), np.concatenate(values, axis=2))
        self.advance(count)

    def advance(self, count: int) -> None:
        """Count `count` tokens as cached, once every layer has them."""
        self.length += count

    def _joined(self, layer: int, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        if self._sliding[layer]:
            keep = self._window - 1
            new = new[:, :, max(0, new.shape[2] - keep) :]
            old = old[:, :, max(0, old.shape[2] + new.shape[2] - keep) :]
        return np.concatenate([old, new], axis=2)


class PastBatch:
    """The past inputs of a pass over some requests, padded to the longest.

    They stay the same for all denoising steps of a block, so they are assembled once and kept until
    the requests or their lengths change.
    """

    def __init__(self) -> None:
        self._key: tuple[tuple[int, int], ...] = ()
        self._caches: list[RequestCache] = []
        self._feeds: Arrays = {}

    def feeds(self, caches: Sequence[RequestCache]) -> Arrays:
        """`past_positions_sliding|full` int64 `[B, O, 8]` (-1 is padding) and `past_key_i`,
        `past_value_i` float32 `[B, kv_heads, O, 8, head_dim]` for every layer i."""
        key = tuple((id(cache), cache.length) for cache in caches)
        if key != self._key:
            # Holding the caches keeps their ids from being reused.
            self._key, self._caches = key, list(caches)
            self._feeds = {}  # not beside its successor: each is as large as the caches
            self._feeds = _assemble(caches)
        return self._feeds


def _assemble(caches: Sequence[RequestCache]) -> Arrays:
    feeds: Arrays = {}
    for kind in ("sliding", "full"):
        width = max(cache.kept(kind) for cache in caches)
        positions = np.full((len(caches), width), -1, np.int64)
        for row, cache in enumerate(caches):
            positions[row, : cache.kept(kind)] = cache.positions(kind)
        feeds[f"past_positions_{kind}"] = past_in_octets(positions, 1, empty=-1)
    for layer in range(len(caches[0].keys)):
        keys, values = ([getattr(c, name)[layer] for c in caches] for name in ("keys", "values"))
        feeds[f"past_key_{layer}"] = past_in_octets(_padded(keys), 2)
        feeds[f"past_value_{layer}"] = past_in_octets(_padded(values), 2)
    return feeds


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    _, heads, _, size = arrays[0].shape
    batch = np.zeros((len(arrays), heads, max(a.shape[2] for a in arrays), size), np.float32)
    for row, array in enumerate(arrays):
        batch[row, :, : array.shape[2]] = array[0]
    return batch
