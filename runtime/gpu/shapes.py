"""Which of the few shapes a pass takes, and the list of them all."""

from __future__ import annotations

from collections.abc import Iterator

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.shapes import ROOMY, PassShape, lengths, round_up, usual_capacity, widths


class PassShapes:
    """The shapes of one model's passes.

    With `batch` above 1, requests share denoising passes, which then always have that many rows, and one width: what a
    request computes must not depend on how many others there are, or on how long they are.
    """

    def __init__(self, config: ModelConfig, chunk: int, most: int, batch: int) -> None:
        """`chunk`: the most tokens of an encoding pass; `most`: of a full layer's past."""
        self._config, self._batch = config, batch
        self.widths = (most,) if batch > 1 else widths(most)
        self.lengths = lengths(max(chunk, config.canvas_length))

    def encode(self, tokens: int, width: int) -> PassShape:
        """Return the shape of the pass that encodes one request's `tokens`.

        Long pasts have fewer lengths: there, a padded one costs little of what a request costs.
        """
        length = round_up(tokens, self.lengths)
        if width > self.widths[0]:
            length = max(length, min(ROOMY, self.lengths[-1]))
        roomy = length <= ROOMY
        capacity = length if roomy else usual_capacity(self._config, length)
        return PassShape("encode", 1, length, capacity, width)

    def denoise(self, shared: bool, width: int, crowded: bool = True) -> PassShape:
        """Return the shape of a shared denoising pass, or of one request's own.

        `crowded` gives each expert room for all of the request's tokens.
        """
        length = self._config.canvas_length
        batch = self._batch if shared else 1
        usual = usual_capacity(self._config, batch * length)
        capacity = length if crowded and not shared else usual
        return PassShape("denoise", batch, length, capacity, width)

    def __iter__(self) -> Iterator[PassShape]:
        """Return every shape once, the narrowest first."""
        shapes: list[PassShape] = []
        for width in self.widths:
            shapes += [self.encode(tokens, width) for tokens in self.lengths]
            shapes.append(self.denoise(self._batch > 1, width, crowded=False))
            shapes.append(self.denoise(False, width))
        yield from dict.fromkeys(shapes)
