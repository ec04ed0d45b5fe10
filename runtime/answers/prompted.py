"""A prompt on its way into the cache, as every kind of running request has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import EncodeInput, Hidden
from canvasrt.runtime.pictures import Picture, groups_of, next_part
from canvasrt.runtime.prefix import Chunk, chunks_of


class Prompted:
    """Tokens that wait for their encoding, prompt first; the generator takes them chunk by chunk.

    A prompt with `pictures` is all that is ever encoded.
    """

    def __init__(
        self, prompt: Sequence[int], model: Model, pictures: Sequence[Picture] = ()
    ) -> None:
        self.row = model.new_row()
        self._model = model
        self._hidden: Hidden = None
        self.owner = ""
        self.passes = self.turn = 0  # in all, and since it got its place
        self.pending = np.array(prompt, np.int64)
        self._clean = [self.pending]  # all that was to be encoded, part by part
        self._later: list[np.ndarray] = []  # parts behind the pending one
        self._again = self._returning = False  # encodes what it had encoded before it was parked
        # How the prompt is cut for encoding, as far as it is pending; and whether it may be shared.
        self.shares = not pictures
        self.chunks = chunks_of(self.pending, model.prefill_chunk) if self.shares else []
        self._pictures = pictures
        self._groups = groups_of(self.pending, pictures, model.config)
        self._see = model.see
        self.prompt = [int(token) for token in prompt]
        self.cached = 0
        self._chunk_size = model.prefill_chunk

    @property
    def parks(self) -> bool:
        """Whether it can make room for another request: not before it has got back to where it was."""
        return not self._returning

    def park(self) -> None:
        """Make room for another request. What must be encoded again is cut into the same chunks."""
        self._hidden, lost = self._model.park(self.row, self._hidden)
        if lost:
            self.pending, *self._later = self._clean
            if self.shares:
                self.chunks = chunks_of(self.pending, self._chunk_size)
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
        """Return the tokens to encode next."""
        if self._pictures:
            groups = self._groups[-self.pending.size :]
            part = next_part(self.pending, groups, self._pictures, self._chunk_size, self._see)
            return EncodeInput(self.row, *part)
        size = self.chunks[0].size if self.chunks else self._chunk_size
        return EncodeInput(self.row, self.pending[:size])

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
