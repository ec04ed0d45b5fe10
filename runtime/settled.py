"""Which tokens of a canvas are final before their block is."""

from __future__ import annotations

import numpy as np

from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.sampling_params import SamplingParams


class SettledPrefix:
    """The beginning of one block's canvas that no later step changes.

    The sampler alone guarantees nothing: each step draws a new set of accepted positions, so any
    token may still change until the block's last step. Hence the rule of `settle_steps`: a position
    settles once all before it have, and its argmax has stayed the same, with an entropy below
    `confidence_threshold`, for that many steps. From then on its token is fixed.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._wanted = params.settle_steps
        self._threshold = np.float32(params.confidence_threshold)
        self._argmax: np.ndarray | None = None
        self._calm: np.ndarray | None = None  # steps that each position has been calm
        self.tokens: list[int] = []

    def take(self, output: DenoiseOutput) -> list[int]:
        """Apply a step's result; return the tokens that it settles."""
        if not self._wanted:
            return []
        if self._argmax is None or self._calm is None:
            self._calm = np.zeros(len(output.argmax), np.int64)
        else:
            calm = (output.argmax == self._argmax) & (output.entropy < self._threshold)
            self._calm = np.where(calm, self._calm + 1, 0)
        self._argmax = output.argmax
        begin = len(self.tokens)
        ready = self._calm[begin:] >= self._wanted
        count = len(ready) if ready.all() else int(ready.argmin())
        new: list[int] = output.argmax[begin : begin + count].tolist()
        self.tokens += new
        return new

    def over(self, argmax: np.ndarray) -> np.ndarray:
        """Return a canvas with the settled tokens in place of its own."""
        if not self.tokens:
            return argmax
        return np.concatenate([np.array(self.tokens, argmax.dtype), argmax[len(self.tokens) :]])
