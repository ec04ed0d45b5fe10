"""When a block may end before its last denoising step."""

from __future__ import annotations

from collections import deque

import numpy as np

from canvasrt.runtime.sampling_params import SamplingParams


class EarlyStopping:
    """The rule of `early_stop`, over the steps of one block: stable and confident
    (transformers' `StableAndConfidentStoppingCriteria`).

    A block may end once its argmax equals each of the last `stability_threshold` ones, and the mean
    entropy is below `confidence_threshold`, in nats.
    """

    def __init__(self, params: SamplingParams, when_certain: bool = False) -> None:
        """`when_certain`: also end as soon as no position has any entropy left."""
        self._on = params.early_stop
        self._wanted = params.stability_threshold
        self._threshold = np.float32(params.confidence_threshold)
        self._when_certain = when_certain
        self._history: deque[np.ndarray] = deque(maxlen=self._wanted)

    def start_block(self) -> None:
        """Forget the steps of the block before."""
        self._history.clear()

    def stops(self, argmax: np.ndarray, entropy: np.ndarray) -> bool:
        """Apply one step; return whether the block may end with it.

        argmax: int64 `[canvas]`. entropy: float32, of the positions that count.
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
