"""Tokens on their way into the cache, as every kind of running request has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import EncodeInput, Hidden
from canvasrt.runtime.pictures import Picture, groups_of, see_groups
from canvasrt.runtime.prefix import Chunk, chunks_of


class Prompted:
    """Tokens that wait for their encoding: first the prompt, then each finished block that another one
    follows. The generator takes them chunk by chunk."""

    def __init__(
        self, prompt: Sequence[int] | np.ndarray, model: Model, pictures: Sequence[Picture] = ()
    ) -> None:
        self.row = model.new_row()
        self.owner = ""
        self.passes = self.turn = 0  # in all, and since it last got a place
        self.prompt = [int(token) for token in prompt]
        self.pending = np.array(prompt, np.int64)
        self.cached = 0
        self._model = model
        self._hidden: Hidden = None
        self._pictures = pictures
        self._groups = groups_of(self.pending, pictures, model.config)
        # How the prompt is cut for encoding, as far as it is pending.
        self.chunks = self._chunked(self.pending)
        self._clean = [self.pending]  # all tokens that were ever pending, part by part
        self._later: list[np.ndarray] = []  # parts behind the pending one
        self._again = False  # whether they were in the cache before
        self._returning = False  # they are being encoded again

    @property
    def parks(self) -> bool:
        """Whether it can make room for another request: not before it has got back to where it was."""
        return not self._returning

    def park(self) -> None:
        """Make room for another request. The tokens stay the same: what must be encoded again is
        cut into the same chunks."""
        self._hidden, lost = self._model.park(self.row, self._hidden)
        if lost:
            self.pending, *self._later = self._clean
            self.chunks = self._chunked(self.pending)
            self._again = self._returning = True

    def encode_next(self, tokens: np.ndarray) -> None:
        """Let tokens that are final now be encoded."""
        self.pending = tokens
        self._clean.append(tokens)

    @property
    def cacheable(self) -> list[Chunk]:
        """The next chunks that the prefix cache may hold."""
        return self.chunks

    def skip(self, count: int) -> None:
        """Count the prompt's next `count` chunks as encoded: they came from the prefix cache."""
        size = sum(chunk.size for chunk in self.chunks[:count])
        self.chunks = self.chunks[count:]
        self.cached += 0 if self._again else size
        self._advance(size)

    def next_chunk(self) -> EncodeInput:
        """Return the tokens to encode next."""
        size = self.chunks[0].size if self.chunks else self._model.prefill_chunk
        if not (self.chunks and self._pictures):  # text, or behind the prompt
            return EncodeInput(self.row, self.pending[:size])
        begin = len(self._groups) - len(self.pending)
        groups = self._groups[begin : begin + size]
        seen = see_groups(groups, self._pictures, self._model.see)
        return EncodeInput(self.row, self.pending[:size], *seen)

    def encoded(self, count: int) -> Chunk | None:
        """Count `count` tokens as encoded; return their chunk if they are part of the prompt."""
        self._advance(count)
        return self.chunks.pop(0) if self.chunks else None

    def _chunked(self, prompt: np.ndarray) -> list[Chunk]:
        digests = [each.digest for each in self._pictures]
        return chunks_of(prompt, self._model.prefill_chunk, self._groups, digests)

    def _advance(self, count: int) -> None:
        self.pending = self.pending[count:]
        if not self.pending.size and self._later:
            self.pending = self._later.pop(0)
        elif not self.pending.size and self._returning:
            self._returning, self.turn = False, 0
