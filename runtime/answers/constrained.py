"""Generation under a grammar: in every step, a beam search finds a likely string that the grammar allows."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.allowance import EAGER, Allowance, SlowGrammarError
from canvasrt.runtime.answers.grammar import GrammarState
from canvasrt.runtime.answers.search import Found, near, search
from canvasrt.runtime.answers.searchers import Searchers
from canvasrt.runtime.early_stop import EarlyStopping
from canvasrt.runtime.host_head import log_softmax
from canvasrt.runtime.host_sampler import accept, biased
from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import DenoiseOutput, Outputs
from canvasrt.runtime.request import Block, Event, FinishReason, Request
from canvasrt.runtime.request_state import RequestState

log = logging.getLogger(__name__)

# Searches run on separate threads, so that one request's grammar does not delay other requests' steps. Grammars that
# proved to be slow share one separate thread, which yields to all other threads.
_QUICK, _SLOW = Searchers(2), Searchers(1)
# Limits in CPU seconds, to which every token adds TOKEN_SECONDS. A search that exceeds QUICK_SECONDS counts as slow.
# SEARCH_SECONDS limits all searches of a request together.
QUICK_SECONDS, SEARCH_SECONDS = 0.2, 5.0


@dataclass(frozen=True, kw_only=True)
class ConstrainedRequest(Request):
    """A request whose answer follows a grammar.

    start: the grammar's initial state. end: the token that ends the answer.
    """

    start: GrammarState
    end: int

    def check(self, model: Model) -> None:
        super().check(model)
        model.host_head.check_signal("leave out the grammar")

    def validate(self, config: ModelConfig, max_context: int) -> None:
        super().validate(config, max_context)
        self.refuse(("logprobs", "settle_steps", "score_blocks", "redo_below"), "a grammar")


class ConstrainedState(RequestState):
    """The state of one constrained request between passes."""

    def __init__(self, id: int, request: ConstrainedRequest, model: Model, added: float) -> None:
        super().__init__(id, request, model, added)
        self._end, self._start, self._state = request.end, request.start, request.start.copy()
        self._ends = sorted({request.end, *request.params.eos_token_ids})
        self._near = near(request.start)
        self._found: Found | None = None  # the last step's string
        self._left = SEARCH_SECONDS
        # An entropy of 0 means that the grammar allows only one token.
        self._early = EarlyStopping(request.params, when_certain=True)

    def collect(self) -> list[Event]:
        if self.job is None or not self.job.done():
            return []
        job, self.job = self.job, None
        try:
            result = job.result()
        except SlowGrammarError:
            if self._slow:
                return self._give_up("grammar")
            self._start.slow = True
            self._begin_search()
            return []
        except CanvasError:
            return self._give_up("grammar")
        except BaseException:  # raising would fail every request of the generator
            log.exception("a search failed")
            return self._give_up("grammar")
        if result is None:
            return self._give_up("length")
        self._found, step = result
        return self._advance(step)

    @property
    def _room(self) -> int:
        return self._params.max_new_tokens - len(self._tokens)

    @property
    def _outputs(self) -> Outputs:
        return "hidden"

    def _first_canvas(self) -> np.ndarray:
        canvas = super()._first_canvas()
        forced = self._state.forced()[: len(canvas)]
        canvas[: len(forced)] = forced
        return canvas

    def _sample(self, output: DenoiseOutput) -> None:
        """Start the step's search. `collect` continues with its result."""
        assert output.hidden is not None
        self._pass = output.hidden
        self._begin_search()

    def _begin_search(self) -> None:
        self._slow = self._start.slow
        # A slow search ends its request's turn at once, so that another request can run meanwhile.
        self.job_began = 0.0 if self._slow else time.monotonic()
        searchers = _SLOW if self._slow else _QUICK
        self.job = searchers.submit(self.owner, partial(self._search, self._pass, self._slow))

    def _search(self, hidden: np.ndarray, slow: bool) -> tuple[Found, DenoiseOutput] | None:
        """Search for the best string, and run the sampler over the tokens that the grammar allows. Return None if no
        answer fits the budget."""
        head, config, params = self._model.host_head, self._model.config, self._params
        length, pad = len(hidden), config.pad_token_id
        logits = biased(head.logits(hidden), params)
        logits /= params.temperature_at(self._step)
        logs = log_softmax(logits)
        # Only `end` can end the answer, so it gets the probabilities of all tokens that end the sequence.
        logs[:, self._end] = np.logaddexp.reduce(logs[:, self._ends], axis=1)
        most = min(length, self._room)
        seconds = self._left if slow else QUICK_SECONDS
        allowance = Allowance(seconds, lambda: self.cancelled, 0.0 if slow else EAGER)
        room, near = self._room, self._near
        try:
            found = search(self._state, logs, most, room, near, self._end, pad, allowance)
        finally:
            self._left += allowance.left - seconds
        if found is None:
            return None
        argmax = np.full(length, pad, np.int64)
        argmax[: len(found.tokens)] = found.tokens
        shares = np.zeros((length, config.vocab_size), np.float32)
        entropy, noise = np.zeros(length, np.float32), self._noise(self._step)[1]
        shares[len(found.tokens) :, pad], noise[len(found.tokens) :] = 1, pad
        for place, tokens in enumerate(found.allowed):
            own = log_softmax(logs[place, tokens])
            shares[place, tokens] = np.exp(own)
            entropy[place] = max(0.0, -float(np.exp(own) @ own))
            noise[place] = tokens[noise[place] * len(tokens) // config.vocab_size]
        accepted = accept(entropy, params.entropy_bound)
        canvas = np.where(accepted, argmax, noise)
        following = head.next_hidden(canvas, head.mean_embedding(shares))
        return found, DenoiseOutput(canvas, argmax, entropy, accepted, following)

    def _end_block(self, canvas: np.ndarray, settled: int, step: DenoiseOutput) -> list[Event]:
        assert self._found is not None
        found, self._state = self._found, self._found.state
        reason: FinishReason | None = None
        if found.ended:
            # A grammar that allows an empty answer is treated as free text, which the token limit can cut anywhere.
            reason = "length" if found.cut and not self._start.least else "stop"
        block = Block(self.id, len(self._steps), self._step, found.tokens, reason)
        return self._commit_block(block, canvas)

    def _give_up(self, reason: FinishReason) -> list[Event]:
        """End the request without a complete answer."""
        block = Block(self.id, len(self._steps), self._step, [], reason)
        return self._commit_block(block, np.empty(0, np.int64))
