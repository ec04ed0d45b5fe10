"""The loop over blocks, which all kinds of requests share.

noise → pass → sampler → settle → end of block

Subclasses define a block's beginning (`_allowed_tokens`, `_first_canvas`), the step after a pass (`_sample`), and the
end of a block (`_end_block`). To score a block, `TextState` adds a pass after it (`next_step`, `take`, `encoded`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from canvasrt.runtime.conditions import among
from canvasrt.runtime.early_stop import EarlyStopping, SettledPrefix
from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.host_sampler import host_step, redrawn
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import (
    DenoiseInput,
    DenoiseOutput,
    EncodeInput,
    Hidden,
    Outputs,
    hidden_input,
)
from canvasrt.runtime.prefill_queue import PrefillQueue
from canvasrt.runtime.request import (
    Block,
    BlockScore,
    Draft,
    Event,
    Finished,
    FinishReason,
    Request,
    Result,
    Settled,
    Timings,
)


class RequestState(ABC):
    """The state of one request between passes.

    Follows transformers' `DiffusionGemmaGenerationMixin.generate` for a batch of one.
    """

    shows_drafts = True

    def __init__(
        self,
        id: int,
        request: Request,
        model: Model,
        added: float,
        watch: Callable[[np.ndarray], bool] | None = None,
    ) -> None:
        """`watch` is passed to the prefill queue."""
        self.id, self.owner = id, request.owner
        self.prompt = [int(token) for token in request.prompt_token_ids]
        self.row = model.new_row()
        self.queue = PrefillQueue(request.prompt_token_ids, request.pictures, model, watch)
        self.passes = self.turn = self.place = 0  # set by `Schedule`
        self.next_encoding = 0  # time on the generator's clock at which the next chunk is due
        self.finished = self.cancelled = False
        # A search on another thread, whose result the next step needs.
        self.job: Future[Any] | None = None
        self.job_began = 0.0
        self._model, self._params = model, request.params
        self._length = request.params.canvas(model.config)
        self._added = added
        self._first_block: float | None = None  # seconds
        self._tokens: list[int] = []
        self._logprobs: list[TokenScore] = []
        self._block_scores: list[BlockScore] = []
        self._steps: list[int] = []  # denoising steps of each earlier block
        self._step = self._attempt = 0  # numbers of the step and the attempt within this block
        self._hidden: Hidden = None
        self._allowed: dict[int, np.ndarray] = {}  # allowed tokens, keyed by canvas position
        self._early = EarlyStopping(request.params)
        self._settled = SettledPrefix(request.params)

    # Called by the generator.

    @property
    def waits(self) -> bool:
        """Whether no step is possible yet, because tokens must be encoded or a search's result is missing."""
        return not self.queue.empty or self.job is not None

    @property
    def parks(self) -> bool:
        """Whether the request can be parked. False while its tokens are being encoded again after it was parked."""
        return not self.queue.returning

    @property
    def searches(self) -> bool:
        """Whether a search for the next step is running."""
        return self.job is not None and not self.job.done()

    def park(self) -> None:
        """Release the request's place in the batch. If the model then drops the request's tokens from the cache, they
        are encoded again later."""
        self._hidden, lost = self._model.park(self.row, self._hidden)
        if lost:
            self.queue.rewind()

    def skip(self, count: int) -> None:
        """Count the next `count` chunks as encoded, because they came from the prefix cache."""
        returning = self.queue.returning
        self.queue.skip(count)
        self._came_back(returning)

    def next_chunk(self) -> EncodeInput:
        """Return the input of the next encoding pass."""
        return self.queue.input(self.row)

    def encoded(self) -> list[Event]:
        """Count the chunk of `next_chunk` as encoded. Return the resulting events."""
        returning = self.queue.returning
        self.queue.advance()
        self._came_back(returning)
        return []

    def next_step(self) -> DenoiseInput:
        """Return the input of the next denoising step. At a block's first step, create its canvas."""
        if self._step == 0:
            self._allowed = self._allowed_tokens()
            self._hidden = self._model.first_hidden(self._first_canvas())
            self._early.start_block()
            self._settled = SettledPrefix(self._params)
        self._step += 1
        if self._outputs == "hidden":
            return hidden_input(self.row, self._hidden)
        return DenoiseInput(
            self.row,
            self._hidden,
            self._params.temperature_at(self._step),
            self._params.entropy_bound,
            *self._noise(self._step),
            self._outputs,
        )

    def take(self, output: DenoiseOutput) -> list[Event]:
        """Apply a step's output. Return the resulting events: the draft, settled tokens, and the end of a block or
        request."""
        step = self._sample(output)
        return [] if step is None else self._advance(step)

    def collect(self) -> list[Event]:
        """Return the events of the request's search, if it has finished."""
        return []

    def cancel(self) -> Result:
        """Stop the request's search, if one is running. Return the result so far."""
        self.cancelled = True
        if self.job is not None:
            self.job.cancel()
        return self.result("cancelled")

    def result(self, reason: FinishReason) -> Result:
        """Return the result so far."""
        return Result(
            token_ids=self._tokens,
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            seed=self._params.seed,
            steps=self._steps,
            timings=Timings(self._first_block, time.perf_counter() - self._added),
            cached_tokens=self.queue.cached,
            logprobs=self._logprobs,
            block_scores=self._block_scores,
        )

    # Methods that subclasses override.

    def _allowed_tokens(self) -> dict[int, np.ndarray]:
        """Return, for each restricted position of the block, its allowed tokens, int64 `[k]`."""
        return {}

    def _first_canvas(self) -> np.ndarray:
        """Return the block's first canvas, int64 `[canvas]`."""
        return self._noise(0)[1]

    @property
    def _outputs(self) -> Outputs:
        """The outputs that a pass must return. If tokens are restricted or biased, which engines do not support, the
        host samples from `hidden`."""
        if self._params.logit_bias or self._allowed:
            return "hidden"
        return "both" if self._params.logprobs or self._params.on_host else "tokens"

    def _sample(self, output: DenoiseOutput) -> DenoiseOutput | None:
        """Return the step after sampling, or None if a search must finish first. `collect` then continues the step."""
        if self._outputs != "hidden" and not self._params.on_host:
            return output
        assert output.hidden is not None
        head, (uniforms, noise) = self._model.host_head, self._noise(self._step)
        if self._outputs == "hidden":
            return host_step(
                head, output.hidden, self._allowed, self._params, self._step, uniforms, noise
            )
        temperature = self._params.temperature_at(self._step)
        output, places, states = redrawn(head, output, self._params, temperature, uniforms)
        if not places.size:
            return output
        revised = self._model.revise(self.row, output.next_hidden, places, states)
        return replace(output, next_hidden=revised)

    @abstractmethod
    def _end_block(self, canvas: np.ndarray, settled: int, step: DenoiseOutput) -> list[Event]:
        """Return the events of a block that ends with `step`. The block's first `settled` tokens were already sent."""

    # Subclasses do not override the methods below, except for `_noise`.

    def _noise(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a step's uniform random numbers, and its random tokens, which are drawn from the allowed tokens."""
        size, block = self._model.config.vocab_size, len(self._steps)
        uniforms, tokens = step_noise(
            self._params.seed, block, step, self._length, size, self._attempt
        )
        return uniforms, among(tokens, self._allowed, size)

    def _advance(self, step: DenoiseOutput) -> list[Event]:
        """Apply a sampled step: continue with its canvas, or end the block. Return the events."""
        self._hidden = step.next_hidden
        before = len(self._settled.tokens)
        new = self._settled.take(step)
        canvas = self._settled.over(step.argmax)
        events: list[Event] = []
        if self.shows_drafts:
            events.append(self._draft(canvas, step))
        last = self._step == self._params.max_denoising_steps
        if self._early.stops(step.argmax, step.entropy) or last or self._is_settled():
            events += self._end_block(canvas, before, step)
        elif new:
            logprobs = self._scores_of(step, before, new)
            self._logprobs += logprobs
            events.append(Settled(self.id, len(self._steps), self._step, new, logprobs))
        return events

    def _draft(self, canvas: np.ndarray, step: DenoiseOutput) -> Draft:
        settled, cached = len(self._settled.tokens), self.queue.cached
        shown = (canvas, step.accepted, step.canvas)
        return Draft(self.id, len(self._steps), self._step, *shown, settled, cached)

    def _is_settled(self) -> bool:
        """Whether the settled tokens complete the block: they reach the token limit, an end-of-sequence token, or the
        end of the canvas."""
        tokens = self._settled.tokens
        room = self._params.max_new_tokens - len(self._tokens)
        ended = any(token in self._params.eos_token_ids for token in tokens)
        return ended or len(tokens) >= min(room, self._length)

    def _scores_of(
        self, step: DenoiseOutput, begin: int, tokens: Sequence[int]
    ) -> list[TokenScore]:
        """Return the log-probabilities of `tokens`, which begin at position `begin` and become final in this step. The
        list is empty if log-probabilities are not requested."""
        if not (self._params.logprobs and tokens):
            return []
        assert step.hidden is not None
        return self._token_scores(step.hidden[begin : begin + len(tokens)], tokens, self._step)

    def _token_scores(
        self, hidden: np.ndarray, tokens: Sequence[int], step: int
    ) -> list[TokenScore]:
        top, listed = self._params.top_logprobs, self._params.logprob_token_ids
        return self._model.host_head.scores(hidden, tokens, top, step, listed)

    def _commit_block(self, block: Block, canvas: np.ndarray, encoded: bool = False) -> list[Event]:
        """Append a finished block to the answer; return its events. encoded: whether the block is already in the
        cache."""
        self._steps.append(block.steps)
        self._step = 0
        if self._first_block is None and block.tokens:
            self._first_block = time.perf_counter() - self._added
        self._tokens += block.tokens
        self._logprobs += block.logprobs
        if block.finish:  # the last block need not be encoded
            return [block, self._finish(block.finish)]
        if not encoded:
            self.queue.add(canvas)
        return [block]

    def _finish(self, reason: FinishReason) -> Finished:
        self.finished = True
        return Finished(self.id, self.result(reason))

    def _came_back(self, returning: bool) -> None:
        """Start a new turn once a parked request's tokens are encoded again."""
        if returning and not self.queue.returning:
            self.turn = 0
