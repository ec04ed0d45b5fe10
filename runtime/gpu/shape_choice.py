"""Which of the few shapes a pass takes, and the list of them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.pass_shapes import (
    ROOMY,
    PassShape,
    capacities,
    lengths,
    round_up,
    usual_capacity,
    widths,
)


class PassShapes:
    """The shapes of one model's passes.

    With `batch` above 1, requests share denoising passes, which then always have that many rows, and one width: what a
    request computes must not depend on how many others there are, or on how long they are.
    """

    def __init__(
        self, config: ModelConfig, chunk: int, most: int, batch: int, slots: int | None = None
    ) -> None:
        """`chunk`: the most tokens of an encoding pass; `most`: of a full layer's past; `slots`: the most per expert of
        an encoding pass, by default one for each token."""
        self._config, self._batch = config, batch
        self.widths = (most,) if batch > 1 else widths(most)
        self.lengths = lengths(max(chunk, config.canvas_length))
        self._slots = self.lengths[-1] if slots is None else slots

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

    def roomy(self) -> PassShape:
        """Return the shape of an encoding pass that no expert overflows: the longest that may have a slot for each token.

        It is rare. To be one shape and not many, it has the widest past.
        """
        length = max(each for each in self.lengths if each <= self._slots)
        return PassShape("encode", 1, length, length, self.widths[-1])

    def denoise(self, width: int, load: int = 0) -> PassShape:
        """Return the shape of one request's denoising pass, given the most tokens that an expert got so far."""
        sizes = capacities(self._config)
        capacity = round_up(min(load, sizes[-1]), sizes)
        return PassShape("denoise", 1, self._config.canvas_length, capacity, width)

    def shared(self, width: int) -> PassShape:
        """Return the shape of a denoising pass that requests share."""
        length = self._config.canvas_length
        capacity = usual_capacity(self._config, self._batch * length)
        return PassShape("denoise", self._batch, length, capacity, width)

    def alone(self, canvas: int, width: int, load: int = 0) -> PassShape:
        """Return the shape of the pass that denoises one request's canvas, with padding behind it.

        A canvas shorter than the checkpoint's takes a shape that encoding has too, so nothing more is
        compiled. If no such shape is smaller, it takes that of a whole canvas.
        """
        if canvas < self._config.canvas_length:
            shape = self.encode(canvas, width)
            # With fewer slots than tokens, an expert could overflow again and again.
            if shape.length < self._config.canvas_length and shape.capacity == shape.length:
                return replace(shape, phase="denoise")
        return self.denoise(width, load)

    def __iter__(self) -> Iterator[PassShape]:
        """Return every shape once, the narrowest first."""
        shapes: list[PassShape] = []
        for width in self.widths:
            shapes += [self.encode(tokens, width) for tokens in self.lengths]
            if self._batch > 1:
                shapes.append(self.shared(width))
            shapes += [self.denoise(width, load) for load in capacities(self._config)]
        shapes.append(self.roomy())
        yield from dict.fromkeys(shapes)
