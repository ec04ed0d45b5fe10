"""The chunks in which a request's tokens are encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import EncodeInput, Row
from canvasrt.runtime.pictures import Picture, groups_of, see_groups
from canvasrt.runtime.prefix import Chunk, chunks_of


class PrefillQueue:
    """The chunks of the prompt and then of every block except the last. A cursor marks the chunk to encode next.

    A request whose tokens were dropped from the cache rewinds the cursor, so that all chunks are encoded again.
    """

    def __init__(
        self,
        prompt: Sequence[int] | np.ndarray,
        pictures: Sequence[Picture],
        model: Model,
        watch: Callable[[np.ndarray], bool] | None = None,
    ) -> None:
        """`watch` is the `EncodeInput.keep` of the prompt's last chunk and of every block's last chunk."""
        self._model, self._pictures, self._watch = model, pictures, watch
        tokens = np.array(prompt, np.int64)
        self._size = len(tokens)
        groups = groups_of(tokens, pictures, model.config) if pictures else None
        digests = [each.digest for each in pictures]
        self._chunks = chunks_of(tokens, model.prefill_chunk, groups, digests)
        self._watch_last()
        self._scores: list[TokenScore] | None = None
        self._next = self._furthest = 0
        self.cached = 0  # tokens of the prompt that came from the prefix cache

    @property
    def empty(self) -> bool:
        """Whether all tokens are in the cache."""
        return self._next == len(self._chunks)

    @property
    def returning(self) -> bool:
        """Whether chunks are being encoded again after a rewind."""
        return self._next < self._furthest

    @property
    def next(self) -> Chunk:
        """The chunk to encode next."""
        return self._chunks[self._next]

    @property
    def begin(self) -> int:
        """Number of tokens before the next chunk."""
        return sum(each.size for each in self._chunks[: self._next])

    @property
    def sharing(self) -> tuple[bytes, int] | None:
        """The next chunk's key, or None if the request must encode the chunk itself. If several requests have equal
        keys, one of them can encode and score the chunk for all."""
        if self.empty or not self.next.key or (self.next.keep and self._scores is None):
            return None
        return self.next.key, id(self._scores)

    def cacheable(self) -> list[Chunk]:
        """Return the chunks, from the next one on, that the prefix cache could hold. Stop before a chunk that has a
        `keep` callback and is not scored yet: the callback needs outputs, which the cache lacks."""
        found: list[Chunk] = []
        end = self.begin
        for chunk in self._chunks[self._next :]:
            end += chunk.size
            if not chunk.key or (chunk.keep is not None and not self.is_scored(end)):
                break
            found.append(chunk)
        return found

    def is_scored(self, end: int) -> bool:
        """Whether scores are known for all prompt tokens up to position `end`, including the token at `end` if there is
        one."""
        known = len(self._scores or ())
        return known > end or known == self._size

    def input(self, row: Row) -> EncodeInput:
        """Return the next chunk as the input of an encoding pass."""
        chunk = self.next
        groups, features = None, None
        if chunk.groups is not None:
            groups, features = see_groups(chunk.groups, self._pictures, self._model.see)
        return EncodeInput(row, chunk.tokens, groups, features, chunk.keep, chunk.whole)

    def watch_prompt(self, watch: Callable[[np.ndarray], bool], scores: list[TokenScore]) -> None:
        """Set `watch` as the `EncodeInput.keep` of all chunks of the prompt. The callback adds to `scores`, which
        several requests can share. Chunks without scores are not taken from the prefix cache."""
        self._scores = scores
        self._chunks = [each._replace(keep=watch, whole=True) for each in self._chunks]

    def add(self, tokens: np.ndarray) -> None:
        """Append a block's tokens, int64 `[n]`."""
        size = self._model.prefill_chunk
        self._chunks += [Chunk(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        self._watch_last()

    def add_trial(self, tokens: np.ndarray, keep: Callable[[np.ndarray], bool]) -> None:
        """Append a trial: tokens in one chunk, whose `keep` decides whether they stay in the cache. Call `keep_trial`
        or `drop_trial` next."""
        self._chunks.append(Chunk(tokens, keep=keep, whole=True))

    def keep_trial(self) -> None:
        """Turn the last trial into a block's chunk."""
        self._watch_last()

    def drop_trial(self) -> None:
        """Remove the last trial, which did not stay in the cache."""
        self._chunks.pop()
        self._next = self._furthest = len(self._chunks)

    def advance(self) -> None:
        """Count the next chunk as encoded."""
        self._next += 1
        self._furthest = max(self._furthest, self._next)

    def skip(self, count: int) -> None:
        """Count the next `count` chunks as encoded, because they came from the prefix cache."""
        for _ in range(count):
            self.cached += 0 if self.returning else self.next.size
            self.advance()

    def rewind(self) -> None:
        """Start again at the first chunk."""
        self._next = 0

    def _watch_last(self) -> None:
        self._chunks[-1] = self._chunks[-1]._replace(keep=self._watch)
