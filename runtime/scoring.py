"""The stage after a block: scores the block, and decides whether to redo it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import check_finite
from canvasrt.runtime.request import Block, BlockScore
from canvasrt.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class Attempt:
    """One attempt at a block: the canvas, and the block's tokens."""

    block: Block
    canvas: np.ndarray  # int64 [canvas]
    score: float = -np.inf

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.block.tokens, np.int64)

    def canvas_to_score(self, pad: int) -> np.ndarray:
        """Return the canvas with padding after the token that ends the sequence."""
        canvas = self.canvas.copy()
        if self.block.finish == "stop":
            canvas[len(self.block.tokens) :] = pad
        return canvas


class Scoring:
    """The attempts at the current block. A block is sent only after it is scored. Its score is the mean log-probability
    of its tokens at temperature 1, either

    - from the block's causal encoding pass, which predicts every token from the tokens before it; or
    - with `score_by_denoising`, from one more denoising pass over the finished block.

    A block is redone, at most `max_redos` times, while its score is below `redo_below`. If no attempt reaches
    `redo_below`, the attempt with the highest score becomes the block.
    """

    def __init__(self, params: SamplingParams, model: Model) -> None:
        self.by_denoising = params.score_by_denoising
        self.open: Attempt | None = None  # the attempt that waits for its score or for `decide`
        self.scored = False  # whether the open attempt has its score
        self._params, self._model = params, model
        self._attempts: list[Attempt] = []  # the scored attempts at the current block
        # The encoder's outputs at the last token before the block, and at the attempt's last token.
        self._before = self._after = np.empty((0, 0), np.float32)

    def watch(self, hidden: np.ndarray) -> bool:
        """Store the encoder's output at a chunk's last token. This is the `watch` callback of `PrefillQueue`."""
        self._before = hidden[-1:].copy()
        return True

    def begin(self, block: Block, canvas: np.ndarray) -> Callable[[np.ndarray], bool] | None:
        """Set the open attempt. If its encoding pass computes the score, return the callback for that pass."""
        self.open = Attempt(block, canvas)
        return None if self.by_denoising else self._judge

    def score(self, hidden: np.ndarray) -> None:
        """Score the open attempt. `hidden` `[n, hidden_size]` are the outputs that predict its tokens."""
        assert self.open is not None
        logs = self._model.host_head.log_likelihoods(hidden, self.open.tokens)
        check_finite(logs, "scores")
        self._attempts.append(replace(self.open, score=float(logs.mean())))
        self.scored = True

    def decide(self) -> tuple[Attempt | None, bool]:
        """Return the accepted attempt, or None if the block must be redone; and whether the attempt's tokens are
        already in the cache."""
        best, last = self._best(), self._attempts[-1]
        encoded = not self.by_denoising and best is last and not last.block.finish
        self.open, self.scored = None, False
        if best is None:
            return None, False
        score = BlockScore(best.score, len(self._attempts) - 1)
        steps = sum(each.block.steps for each in self._attempts)
        self._attempts = []
        if encoded:
            self._before = self._after
        return replace(best, block=replace(best.block, steps=steps, score=score)), encoded

    def _judge(self, hidden: np.ndarray) -> bool:
        """Score the open attempt from its encoding pass; return whether its tokens stay in the cache."""
        self.score(np.concatenate([self._before, hidden[:-1]]))
        self._after = hidden[-1:].copy()
        last = self._attempts[-1]
        return self._best() is last and not last.block.finish

    def _best(self) -> Attempt | None:
        """Return the accepted attempt, or None if the block must be redone."""
        last = self._attempts[-1]
        if last.score >= self._params.redo_below or self._params.redo_below == 0:
            return last
        if len(self._attempts) <= self._params.max_redos:
            return None
        return max(self._attempts, key=lambda each: each.score)
