"""Generation under a grammar: every canvas is the likeliest string that the grammar allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.grammar import GrammarState
from canvasrt.runtime.answers.search import near, search
from canvasrt.runtime.candidates import biased
from canvasrt.runtime.early_stop import EarlyStopping
from canvasrt.runtime.host_head import log_softmax
from canvasrt.runtime.host_sampler import accept
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, hidden_input
from canvasrt.runtime.pictures import Picture
from canvasrt.runtime.prompted import Prompted
from canvasrt.runtime.request import (
    Block,
    Draft,
    Event,
    Finished,
    FinishReason,
    Request,
    Result,
    Timings,
)
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.watch import Watch

log = logging.getLogger(__name__)

# Searches run beside the passes, so that one request's grammar does not hold up another's step.
_SEARCHERS = ThreadPoolExecutor(2, "canvasrt-grammar")
SEARCHES = Watch()


@dataclass(frozen=True)
class ConstrainedRequest:
    """A prompt, how to continue it, and the first state of the grammar that the answer follows.

    end: the token that ends the answer.
    """

    prompt_token_ids: Sequence[int] | np.ndarray
    params: SamplingParams
    start: GrammarState
    end: int
    pictures: Sequence[Picture] = ()  # one for each run of image tokens in the prompt
    owner: str = ""  # the caller, between whom the passes are shared

    def validate(self, config: ModelConfig, max_context: int) -> None:
        """Raise CanvasError for a request that could not run without a grammar either, or one that
        also asks for what a grammar does not support."""
        Request(self.prompt_token_ids, self.params, self.pictures).validate(config, max_context)
        for name in ("logprobs", "settle_steps", "score_blocks", "redo_below"):
            if getattr(self.params, name):
                raise CanvasError(
                    f"{name} is not supported together with a grammar", f"leave out {name}"
                )


@dataclass(frozen=True)
class _Step:
    """What a step made of a canvas: the string, the place in the grammar behind it, and the rest."""

    tokens: list[int]
    state: GrammarState
    ended: bool
    argmax: np.ndarray
    canvas: np.ndarray
    accepted: np.ndarray
    entropy: np.ndarray
    next_hidden: np.ndarray


class ActiveConstrained(Prompted):
    """The state of one constrained request between passes."""

    def __init__(self, id: int, request: ConstrainedRequest, model: Model, added: float) -> None:
        super().__init__(request.prompt_token_ids, model, request.pictures)
        self.id = id
        self.finished = False
        self.job: Future[_Step | None] | None = None
        self._request, self._params = request, request.params
        self._added = added
        self._first_block: float | None = None
        self._state = request.start
        self._near = near(request.start)
        self._tokens: list[int] = []
        self._steps: list[int] = []
        self._step = 0
        # Without entropy, the grammar leaves nothing to choose.
        self._early = EarlyStopping(self._params, when_certain=True)

    @property
    def parks(self) -> bool:
        """Whether it can make room for another request: not while a search is under way."""
        return self.job is None and super().parks

    def next_step(self) -> DenoiseInput:
        """Return the input of the next denoising step."""
        if self._step == 0:
            canvas = self._noise(0)[1]
            forced = self._state.forced()[: len(canvas)]
            canvas[: len(forced)] = forced
            self._hidden = self._model.first_hidden(canvas)
            self._early.start_block()
        self._step += 1
        return hidden_input(self.row, self._hidden)

    def take(self, output: DenoiseOutput) -> list[Event]:
        """Start the search that this step's result needs; `collect` returns its events."""
        assert output.hidden is not None
        self.job = _SEARCHERS.submit(self._search, output.hidden)
        return []

    def collect(self) -> list[Event]:
        """Return what the search led to, once it is done."""
        if self.job is None or not self.job.done():
            return []
        job, self.job = self.job, None
        try:
            step = job.result()
        except CanvasError:
            return self._end("grammar")
        except BaseException:  # it must not fail a pass, which others share
            log.exception("a search failed")
            return self._end("grammar")
        if step is None:
            return self._end("length")
        events: list[Event] = [
            Draft(self.id, len(self._steps), self._step, step.argmax, step.accepted, step.canvas)
        ]
        self._hidden = step.next_hidden
        stops = self._early.stops(step.argmax, step.entropy)
        if stops or self._step == self._params.max_denoising_steps:
            events += self._finish_block(step)
        return events

    def result(self, reason: FinishReason) -> Result:
        """Return the result so far."""
        return Result(
            token_ids=self._tokens,
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            seed=self._params.seed,
            steps=self._steps,
            timings=Timings(self._first_block, time.perf_counter() - self._added),
            cached_tokens=self.cached,
        )

    @property
    def _room(self) -> int:
        return self._params.max_new_tokens - len(self._tokens)

    def _noise(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        length, size = self._params.canvas(self._model.config), self._model.config.vocab_size
        return step_noise(self._params.seed, len(self._steps), step, length, size)

    def _search(self, hidden: np.ndarray) -> _Step | None:
        with SEARCHES.busy():
            return self._made(hidden)

    def _made(self, hidden: np.ndarray) -> _Step | None:
        """Run the sampler over what the grammar allows. None if no answer ends within the budget."""
        head, config = self._model.host_head, self._model.config
        length, pad, end = len(hidden), config.pad_token_id, self._request.end
        logits = biased(head.logits(hidden), self._params)
        logits /= self._params.temperature_at(self._step)
        logs = log_softmax(logits)
        room = self._room
        found = search(self._state, logs, min(length, room), room, self._near, end, pad)
        if found is None:
            return None
        argmax = np.full(length, pad, np.int64)
        argmax[: len(found.tokens)] = found.tokens
        shares = np.zeros((length, config.vocab_size), np.float32)
        entropy, noise = np.zeros(length, np.float32), self._noise(self._step)[1]
        for place in range(length):
            if place >= len(found.tokens):
                shares[place, pad], noise[place] = 1, pad
                continue
            tokens = found.allowed[place]
            own = log_softmax(logs[place, tokens])
            shares[place, tokens] = np.exp(own)
            entropy[place] = max(0.0, -float(np.exp(own) @ own))
            noise[place] = tokens[noise[place] * len(tokens) // config.vocab_size]
        accepted = accept(entropy, self._params.entropy_bound)
        canvas = np.where(accepted, argmax, noise)
        following = head.next_hidden(canvas, head.mean_embedding(shares))
        return _Step(
            found.tokens, found.state, found.ended, argmax, canvas, accepted, entropy, following
        )

    def _finish_block(self, step: _Step) -> list[Event]:
        index, steps = len(self._steps), self._step
        self._steps.append(steps)
        self._step = 0
        if self._first_block is None:
            self._first_block = time.perf_counter() - self._added
        self._tokens += step.tokens
        self._state = step.state
        reason: FinishReason | None = None
        if step.ended:
            reason = "stop"
        elif self._room <= 0:
            reason = "stop" if step.state.accepts else "length"
        events: list[Event] = [Block(self.id, index, steps, step.tokens, reason)]
        if reason:
            self.finished = True
            events.append(Finished(self.id, self.result(reason)))
        else:
            self.encode_next(step.argmax)
        return events

    def _end(self, reason: FinishReason) -> list[Event]:
        """End the request without a whole answer."""
        self._steps.append(self._step)
        self.finished = True
        return [
            Block(self.id, len(self._steps) - 1, self._step, [], reason),
            Finished(self.id, self.result(reason)),
        ]
