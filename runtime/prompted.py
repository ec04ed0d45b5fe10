"""Tokens on their way into the cache, as every kind of running request has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import EncodeInput, Hidden
from canvasrt.runtime.pictures import Picture, groups_of, next_part
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
        # How the prompt is cut for encoding, as far as it is pending; and whether it may be shared.
        self.shares = not pictures
        self.chunks = chunks_of(self.pending, model.prefill_chunk) if self.shares else []
        self.cached = 0
        self._model = model
        self._hidden: Hidden = None
        self._pictures = pictures
        self._groups = groups_of(self.pending, pictures, model.config)
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
            most = self._model.prefill_chunk
            self.chunks = chunks_of(self.pending, most) if self.shares else []
            self._again = self._returning = True

    def encode_next(self, tokens: np.ndarray) -> None:
        """Let tokens that are final now be encoded."""
        self.pending = tokens
        self._clean.append(tokens)

    @property
    def cacheable(self) -> list[Chunk]:
        """The next chunks that the prefix cache may hold."""
        return self.chunks if self.shares else []

    def skip(self, count: int) -> None:
        """Count the prompt's next `count` chunks as encoded: they came from the prefix cache."""
        size = sum(chunk.size for chunk in self.chunks[:count])
        self.chunks = self.chunks[count:]
        self.cached += 0 if self._again else size
        self._advance(size)

    def next_chunk(self) -> EncodeInput:
        """Return the tokens to encode next. An image's tokens see each other, so they stay together."""
        most, whole = self._model.prefill_chunk, self._clean[0]
        in_prompt = self.pending is whole or self.pending.base is whole
        if not (self._pictures and in_prompt):
            size = self.chunks[0].size if self.chunks else most
            return EncodeInput(self.row, self.pending[:size])
        groups = self._groups[len(whole) - len(self.pending) :]
        part = next_part(self.pending, groups, self._pictures, most, self._model.see)
        return EncodeInput(self.row, *part)

    def encoded(self, count: int) -> Chunk | None:
        """Count `count` tokens as encoded; return their chunk if they are part of the prompt."""
        self._advance(count)
        return self.chunks.pop(0) if self.chunks else None

    def _advance(self, count: int) -> None:
        self.pending = self.pending[count:]
        if not self.pending.size and self._later:
            self.pending = self._later.pop(0)
        elif not self.pending.size and self._returning:
            self._returning, self.turn = False, 0
