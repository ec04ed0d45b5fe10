"""KV caches, one per request, and the inputs that passes read from them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import OCTET, octets
from canvasrt.runtime.body_inputs import Geometry, past_in_octets
from canvasrt.runtime.engine import Arrays


class RequestCache:
    """Keys and values of one request's clean tokens, in octets (groups of eight tokens) as graphs read them: per layer
    float32 `[1, kv_heads, octets, 8, head_dim]`, zero-padded after the last token.

    A sliding layer keeps the last `sliding_window - 1` tokens. A full layer keeps all tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.length = 0
        self._window = config.sliding_window
        self._kinds = [layer.kind for layer in config.layers]
        empty = [
            np.zeros((1, layer.num_kv_heads, octets(0), OCTET, layer.head_dim), np.float32)
            for layer in config.layers
        ]
        self.keys = list(empty)
        self.values = list(empty)

    def kept(self, kind: str) -> int:
        """Return the number of tokens in a layer of this kind."""
        return min(self.length, self._window - 1) if kind == "sliding" else self.length

    def positions(self, kind: str) -> np.ndarray:
        """Return the positions of the tokens in a layer of this kind, int64 `[kept]`."""
        return np.arange(self.length - self.kept(kind), self.length, dtype=np.int64)

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Add one layer's keys and values of new tokens, `[1, kv_heads, n, head_dim]`. After the last layer, call
        `advance`."""
        kept = self.kept(self._kinds[layer])
        keep = min(kept + keys.shape[2], self._most(layer))
        self.keys[layer] = _joined(self.keys[layer], kept, keys, keep)
        self.values[layer] = _joined(self.values[layer], kept, values, keep)

    def mark(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the cache's state, to which `rewind` can return."""
        return list(self.keys), list(self.values)

    def rewind(self, mark: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
        """Undo all `append`s since `mark` was called. `advance` must not have been called since."""
        self.keys, self.values = list(mark[0]), list(mark[1])

    def saved_bytes(self, count: int) -> int:
        """Return the size of a saved copy of `count` tokens, in bytes."""
        sizes = [
            each.shape[1] * each.shape[4] * min(count, self._most(layer))
            for layer, each in enumerate(self.keys)
        ]
        return 2 * np.dtype(np.float32).itemsize * sum(sizes)

    def save(self, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return copies of every layer's keys and values of the last `count` tokens, `[1, kv_heads, n, head_dim]`. If a
        layer keeps fewer tokens, all of them are copied."""
        saved = []
        for kind, keys, values in zip(self._kinds, self.keys, self.values, strict=True):
            kept = self.kept(kind)
            last = slice(max(0, kept - count), kept)
            saved.append((_flat(keys)[:, :, last].copy(), _flat(values)[:, :, last].copy()))
        return saved

    def restore(self, saved: Sequence[list[tuple[np.ndarray, np.ndarray]]], count: int) -> None:
        """Append copies that `save` returned. Together, the copies have `count` tokens."""
        for layer in range(len(self.keys)):
            # A sliding layer's copies can lack old tokens, but have every token in the window.
            keys, values = zip(*(each[layer] for each in saved), strict=True)
            self.append(layer, np.concatenate(keys, axis=2), np.concatenate(values, axis=2))
        self.advance(count)

    def advance(self, count: int) -> None:
        """Count `count` tokens as cached. Call this after these tokens were appended to all layers."""
        self.length += count

    def _most(self, layer: int) -> int:
        """Return the maximum number of tokens in a layer."""
        return self._window - 1 if self._kinds[layer] == "sliding" else sys.maxsize


class CanvasFeeds:
    """The inputs of denoising passes, except for hidden states. Cached tokens are padded to the longest request's
    length.

    The inputs are the same in all steps of a block, so they are reused until the requests or their lengths change.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._key: tuple[object, ...] = ()
        self._caches: list[RequestCache] = []
        self._feeds: Arrays = {}

    def of(self, caches: Sequence[RequestCache], length: int) -> Arrays:
        """Return the inputs of a pass over canvases of `length` tokens: the inputs of `past_feeds` and `token_feeds`,
        and the inputs that `Geometry` adds."""
        key = (length, *((id(cache), cache.length) for cache in caches))
        if key != self._key:
            # Keep the caches alive: the key contains their `id()`, which Python could otherwise reuse.
            self._key, self._caches = key, list(caches)
            self._feeds = {}  # free the old copies before making new ones
            begin = np.array([cache.length for cache in caches], np.int64)
            positions = begin[:, None] + np.arange(length, dtype=np.int64)
            self._feeds = self._geometry.complete(
                past_feeds(caches) | token_feeds(positions, causal=False)
            )
        return self._feeds

    def clear(self) -> None:
        """Release the arrays."""
        self._key, self._caches, self._feeds = (), [], {}


def token_feeds(positions: np.ndarray, causal: bool) -> Arrays:
    """Return the inputs that describe a pass's new tokens, all of them text, at the int64 `positions` `[B, L]`."""
    return {
        "positions": positions,
        "groups": np.full(positions.shape, -1, np.int64),
        "causal": np.full(len(positions), causal),
    }


def past_feeds(caches: Sequence[RequestCache]) -> Arrays:
    """Return the inputs that describe cached tokens: `past_positions_sliding` and `past_positions_full`, int64 `[B, O,
    8]` (-1 is padding), and for every layer i `past_key_i` and `past_value_i`, float32 `[B, kv_heads, O, 8, head_dim]`.

    For a single request, the keys and values are the cache's own arrays, not copies.
    """
    feeds: Arrays = {}
    for kind in ("sliding", "full"):
        width = max(cache.kept(kind) for cache in caches)
        positions = np.full((len(caches), width), -1, np.int64)
        for row, cache in enumerate(caches):
            positions[row, : cache.kept(kind)] = cache.positions(kind)
        feeds[f"past_positions_{kind}"] = past_in_octets(positions, 1, empty=-1)
    for layer in range(len(caches[0].keys)):
        feeds[f"past_key_{layer}"] = _padded([cache.keys[layer] for cache in caches])
        feeds[f"past_value_{layer}"] = _padded([cache.values[layer] for cache in caches])
    return feeds


def _flat(array: np.ndarray) -> np.ndarray:
    """Return `[1, kv_heads, octets, 8, head_dim]` as `[1, kv_heads, tokens, head_dim]`."""
    return array.reshape(*array.shape[:2], -1, array.shape[4])


def _joined(old: np.ndarray, kept: int, new: np.ndarray, keep: int) -> np.ndarray:
    """Append `new` to `old`, and return the last `keep` tokens in octets. `old` holds `kept` tokens in octets; `new` is
    `[1, kv_heads, n, head_dim]`."""
    joined = np.empty((1, old.shape[1], octets(keep), OCTET, old.shape[4]), np.float32)
    tokens = _flat(joined)
    fresh = min(new.shape[2], keep)
    tokens[:, :, : keep - fresh] = _flat(old)[:, :, kept - (keep - fresh) : kept]
    tokens[:, :, keep - fresh : keep] = new[:, :, new.shape[2] - fresh :]
    tokens[:, :, keep:] = 0
    return joined


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    _, heads, _, *octet = arrays[0].shape
    batch = np.zeros((len(arrays), heads, max(a.shape[2] for a in arrays), *octet), np.float32)
    for row, array in enumerate(arrays):
        batch[row, :, : array.shape[2]] = array[0]
    return batch
