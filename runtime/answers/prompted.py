"""A prompt on its way into the cache, as every kind of running request has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import EncodeInput
from canvasrt.runtime.pictures import Picture, groups_of, next_part
from canvasrt.runtime.prefix import Chunk, chunks_of


class Prompted:
    """Tokens that wait for their encoding, prompt first; the generator takes them chunk by chunk.

    A prompt with `pictures` is all that is ever encoded.
    """

    # It keeps its place in the batch until it has ended: a search may be under way.
    parks = False

    def __init__(
        self, prompt: Sequence[int], model: Model, pictures: Sequence[Picture] = ()
    ) -> None:
        self.row = model.new_row()
        self.owner = ""
        self.passes = self.turn = 0  # in all, and since it got its place
        self.pending = np.array(prompt, np.int64)
        # How the prompt is cut for encoding, as far as it is pending; and whether it may be shared.
        self.shares = not pictures
        self.chunks = chunks_of(self.pending, model.prefill_chunk) if self.shares else []
        self._pictures = pictures
        self._groups = groups_of(self.pending, pictures, model.config)
        self._see = model.see
        self.prompt = [int(token) for token in prompt]
        self.cached = 0
        self._chunk_size = model.prefill_chunk

    def park(self) -> None:
        """It never makes room for another request."""
        raise AssertionError("it keeps its place")

    @property
    def cacheable(self) -> list[Chunk]:
        """The next chunks that the prefix cache may hold."""
        return self.chunks if self.shares else []

    def skip(self, count: int) -> None:
        """Count the prompt's next `count` chunks as encoded: they came from the prefix cache."""
        size = sum(chunk.size for chunk in self.chunks[:count])
        self.chunks, self.pending = self.chunks[count:], self.pending[size:]
        self.cached += size

    def next_chunk(self) -> EncodeInput:
        """Return the tokens to encode next."""
        if self._pictures:
            groups = self._groups[-self.pending.size :]
            part = next_part(self.pending, groups, self._pictures, self._chunk_size, self._see)
            return EncodeInput(self.row, *part)
        size = self.chunks[0].size if self.chunks else self._chunk_size
        return EncodeInput(self.row, self.pending[:size])

    def encoded(self, count: int) -> Chunk | None:
        """Count `count` tokens as encoded; return their chunk if they are part of the prompt."""
        self.pending = self.pending[count:]
        return self.chunks.pop(0) if self.chunks else None
