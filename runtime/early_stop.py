"""Early stopping: the rule that ends a block before its last step, and the rule that makes tokens final before their
block ends."""

from __future__ import annotations

from collections import deque

import numpy as np

from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.sampling_params import SamplingParams


class EarlyStopping:
    """The rule of `early_stop` for one block, as in transformers' `StableAndConfidentStoppingCriteria`.

    A block can end once two conditions hold: its likeliest tokens equal those of the previous `stability_threshold`
    steps, and the mean entropy of its positions, in nats, is below `confidence_threshold`.
    """

    def __init__(self, params: SamplingParams, when_certain: bool = False) -> None:
        """`when_certain`: also end as soon as the entropy is 0 at all positions."""
        self._on = params.early_stop
        self._wanted = params.stability_threshold
        self._threshold = np.float32(params.confidence_threshold)
        self._when_certain = when_certain
        self._history: deque[np.ndarray] = deque(maxlen=self._wanted)

    def start_block(self) -> None:
        """Forget the previous block's steps."""
        self._history.clear()

    def stops(self, argmax: np.ndarray, entropy: np.ndarray) -> bool:
        """Apply one step; return whether the block can end after it.

        argmax: int64 `[canvas]`. entropy: float32, only of the positions that the mean covers.
        """
        if not self._on:
            return False
        stable = len(self._history) == self._wanted and all(
            np.array_equal(argmax, before) for before in self._history
        )
        self._history.append(argmax)
        if self._when_certain and not entropy.any():
            return True
        return stable and bool(np.mean(entropy, dtype=np.float32) < self._threshold)


class SettledPrefix:
    """The settled prefix of one block's canvas: tokens at its beginning that no later step changes.

    The sampler itself makes no token final: every step accepts a new set of positions, so any token can change until
    the block's last step. If `settle_steps` is set, a position settles after that many consecutive steps with an
    unchanged likeliest token and an entropy below `confidence_threshold`, but not before all earlier positions have
    settled. Its likeliest token is then fixed.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._wanted = params.settle_steps
        self._threshold = np.float32(params.confidence_threshold)
        self._argmax: np.ndarray | None = None
        # For every position, the number of steps for which it has been stable and confident.
        self._calm: np.ndarray | None = None
        self.tokens: list[int] = []

    def take(self, output: DenoiseOutput) -> list[int]:
        """Apply a step's result; return the newly settled tokens."""
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
        """Return `argmax`, but with its beginning replaced by the settled tokens."""
        if not self.tokens:
            return argmax
        return np.concatenate([np.array(self.tokens, argmax.dtype), argmax[len(self.tokens) :]])
