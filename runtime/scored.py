"""Requests whose blocks get scores, and are redone if the score is low."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.active import ActiveRequest
from canvasrt.runtime.conditions import among
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput, hidden_input
from canvasrt.runtime.prefix import Chunk
from canvasrt.runtime.request import Block, BlockScore, Event, FinishReason, Request, Result


def check_scores(model: Model) -> None:
    """Raise CanvasError if a model cannot score blocks."""
    _ = model.host_head
    if model.prefill_chunk < model.canvas_length:
        raise CanvasError(
            f"the engines encode at most {model.prefill_chunk} tokens together, so they cannot "
            f"score blocks of {model.canvas_length}",
            "leave out score_blocks and redo_below",
        )


@dataclass(frozen=True)
class Attempt:
    """One attempt at a block: its canvas, and the block that it would be."""

    canvas: np.ndarray  # int64 [canvas]
    block: Block
    score: float = -np.inf

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.block.tokens, np.int64)


class ActiveScored(ActiveRequest):
    """The state of one such request between passes.

    A block waits for its score, and nothing of it is sent before. The score is the mean
    log-probability of its tokens at temperature 1, either

    - after the tokens before them, as the causal encoding pass of the block gives it; or
    - with `score_by_denoising`, at their own places, in one more denoising pass over the block.

    If no attempt reaches `redo_below`, the best one stands.
    """

    def __init__(self, id: int, request: Request, model: Model, added: float) -> None:
        super().__init__(id, request, model, added)
        # The encoder's output at the last token before the block; None until it has been encoded.
        self._before: np.ndarray | None = None
        self._after: np.ndarray | None = None
        self._attempts: list[Attempt] = []  # at this block, those with a score
        self._open: Attempt | None = None  # the one that waits for its score
        self._to_score = np.empty(0, np.int64)
        self._events: list[Event] = []
        self._found: list[BlockScore] = []

    @property
    def cacheable(self) -> list[Chunk]:
        # The prefix cache holds no outputs, and the prompt's last one is needed.
        found = super().cacheable
        return found[:-1] if self._wants_last else found

    @property
    def _wants_last(self) -> bool:
        """Whether the output at the last token that is pending is needed."""
        return self._before is None and not self._params.score_by_denoising

    def judged(self) -> list[Event]:
        """Return the events of a block that has its score since the last call."""
        events, self._events = self._events, []
        return events

    def next_chunk(self) -> EncodeInput:
        if self._open is not None and self.pending is self._to_score:
            return EncodeInput(self.row, self.pending, keep=self._judge_encoded, whole=True)
        item = super().next_chunk()
        last = len(item.tokens) == len(self.pending) and not self._later
        return replace(item, keep=self._keep_last) if last and self._wants_last else item

    def encoded(self, count: int) -> Chunk | None:
        scored = self._open is not None and self.pending is self._to_score
        chunk = super().encoded(count)
        if scored:
            self._decide()
        return chunk

    def park(self) -> None:
        super().park()
        waits = self._open is not None and not self._params.score_by_denoising
        if waits and self.pending is not self._to_score:  # all tokens must be encoded again
            self._later.append(self._to_score)

    def next_step(self) -> DenoiseInput:
        if self._open is None:
            return super().next_step()
        return hidden_input(self.row, self._model.first_hidden(_padded(self._open, self._model)))

    def take(self, output: DenoiseOutput) -> list[Event]:
        if self._open is None:
            return super().take(output)
        assert output.hidden is not None
        self._score(output.hidden[: len(self._open.block.tokens)])
        self._decide()
        return self.judged()

    def result(self, reason: FinishReason) -> Result:
        return replace(super().result(reason), block_scores=self._found)

    def _noise(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        block, sizes = len(self._steps), (self._length, self._model.config.vocab_size)
        attempt = len(self._attempts)
        uniforms, tokens = step_noise(self._params.seed, block, step, *sizes, attempt=attempt)
        return uniforms, among(tokens, self._allowed, sizes[1])

    def _stand(self, canvas: np.ndarray, block: Block) -> list[Event]:
        """Hold a block back until it has its score."""
        self._open = Attempt(canvas, block)
        if not self._params.score_by_denoising:
            self.pending = self._to_score = self._open.tokens
        return []

    def _keep_last(self, hidden: np.ndarray) -> bool:
        self._before = hidden[-1:].copy()
        return True

    def _judge_encoded(self, hidden: np.ndarray) -> bool:
        """Score the open attempt; return whether its tokens stay in the cache."""
        assert self._open is not None
        assert self._before is not None
        self._score(np.concatenate([self._before, hidden[:-1]]))
        self._after = hidden[-1:].copy()
        best = self._best
        return best is not None and best is self._attempts[-1] and not best.block.finish

    def _score(self, hidden: np.ndarray) -> None:
        """Give the open attempt its score. `hidden` has the output that predicts each token."""
        assert self._open is not None
        scores = self._model.host_head.log_likelihoods(hidden, self._open.tokens)
        score = float(scores.mean())
        if not np.isfinite(score):
            raise EngineError(
                "the engines returned hidden states that are not finite",
                "check the bundle with `canvasrt verify`, and the GPU's memory with `nvidia-smi -q`",
                fatal=True,
            )
        self._attempts.append(replace(self._open, score=score))

    @property
    def _best(self) -> Attempt | None:
        """The attempt that stands; None while another one should follow."""
        last = self._attempts[-1]
        if last.score >= self._params.redo_below or self._params.redo_below == 0:
            return last
        if len(self._attempts) <= self._params.max_redos:
            return None
        return max(self._attempts, key=lambda each: each.score)

    def _decide(self) -> None:
        """Let an attempt stand, or begin the block anew."""
        self._open = None
        self._step = 0
        best = self._best
        if best is None:
            return
        score = BlockScore(best.score, len(self._attempts) - 1)
        self._found.append(score)
        steps = sum(each.block.steps for each in self._attempts)
        cached = best is self._attempts[-1] and not self._params.score_by_denoising
        self._attempts = []
        self._events += super()._stand(best.canvas, replace(best.block, steps=steps, score=score))
        self._before = self._after if cached else None
        if cached and not self.finished:
            self.pending = np.empty(0, np.int64)


def _padded(attempt: Attempt, model: Model) -> np.ndarray:
    """Return an attempt's canvas with padding behind the token that ends the sequence."""
    canvas, count = attempt.canvas.copy(), len(attempt.block.tokens)
    if attempt.block.finish == "stop":
        canvas[count:] = model.config.pad_token_id
    return canvas
