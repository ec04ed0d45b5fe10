"""The state of one running request: blocks, steps, early stop and end of sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from canvasrt.runtime.conditions import Conditions, among
from canvasrt.runtime.early_stop import EarlyStopping
from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.host_sampler import host_step, redrawn
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, Wants
from canvasrt.runtime.prompted import Prompted
from canvasrt.runtime.request import (
    Block,
    Draft,
    Event,
    Finished,
    FinishReason,
    Request,
    Result,
    Settled,
    Timings,
)
from canvasrt.runtime.settled import SettledPrefix


class ActiveRequest(Prompted):
    """The state of one request between passes.

    Follows transformers' `DiffusionGemmaGenerationMixin.generate` for a batch of one.
    """

    def __init__(self, id: int, request: Request, model: Model, added: float) -> None:
        super().__init__(request.prompt_token_ids, model, request.pictures)
        self.id = id
        self.finished = False
        self.owner = request.owner
        self._params = request.params
        self._length = request.params.canvas(model.config)
        self._blocks = request.params.blocks(model.config)
        self._added = added
        self._first_block: float | None = None
        self._tokens: list[int] = []
        self._scores: list[TokenScore] = []
        self._steps: list[int] = []
        self._step = 0
        self._early = EarlyStopping(request.params)
        self._settled = SettledPrefix(request.params)
        self._conditions = request.conditions or Conditions()
        self._allowed: dict[int, np.ndarray] = {}  # tokens by position of the canvas

    def next_step(self) -> DenoiseInput:
        """Return the input of the next denoising step. The first step of a block creates its
        canvas."""
        if self._step == 0:
            self._hidden = self._model.first_hidden(self._first_canvas())
            self._early.start_block()
            self._settled = SettledPrefix(self._params)
        self._step += 1
        self._drawn = self._noise(self._step)
        return DenoiseInput(
            self.row,
            self._hidden,
            self._params.temperature_at(self._step),
            self._params.entropy_bound,
            *self._drawn,
            self._wants,
        )

    @property
    def _wants(self) -> Wants:
        if self._params.logit_bias or self._allowed:
            return "hidden"
        return "both" if self._params.logprobs or self._params.on_host else "tokens"

    def _first_canvas(self) -> np.ndarray:
        """Return a block's first canvas, int64 `[canvas]`, and note the tokens that it may have."""
        begin, size = len(self._steps) * self._length, self._model.config.vocab_size
        ends = self._params.eos_token_ids
        self._allowed = self._conditions.allowed(begin, self._length, size, ends)
        return self._conditions.seeded(self._noise(0)[1], begin)

    def take(self, output: DenoiseOutput) -> list[Event]:
        """Apply the result of that step. Return its draft, and what it finished."""
        if self._params.on_host or self._allowed:
            output = self._sampled(output)
        block, step = len(self._steps), self._step
        before = len(self._settled.tokens)
        new = self._settled.take(output)
        argmax = self._settled.over(output.argmax)
        events: list[Event] = [
            Draft(
                self.id,
                block,
                step,
                argmax,
                output.accepted,
                output.canvas,
                len(self._settled.tokens),
                self.cached,
            ),
        ]
        self._hidden = output.next_hidden
        last = step == self._params.max_denoising_steps
        if self._early.stops(output.argmax, output.entropy) or last or self._is_settled():
            events += self._finish_block(argmax, before, output)
        elif new:
            scores = self._scored(output, before, new)
            self._scores += scores
            events.append(Settled(self.id, block, step, new, scores))
        return events

    def _sampled(self, output: DenoiseOutput) -> DenoiseOutput:
        """Do the host's part of the sampler."""
        head, (uniforms, noise) = self._model.host_head, self._drawn
        assert output.hidden is not None
        if self._wants == "hidden":
            step = host_step(
                head, output.hidden, self._allowed, self._params, self._step, uniforms, noise
            )
            return DenoiseOutput(**vars(step), hidden=output.hidden)
        temperature = self._params.temperature_at(self._step)
        output, places, states = redrawn(head, output, self._params, temperature, uniforms)
        if not places.size:
            return output
        revised = self._model.revise(self.row, output.next_hidden, places, states)
        return replace(output, next_hidden=revised)

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
            logprobs=self._scores,
        )

    def _noise(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        size, block = self._model.config.vocab_size, len(self._steps)
        uniforms, tokens = step_noise(self._params.seed, block, step, self._length, size)
        return uniforms, among(tokens, self._allowed, size)

    def _is_settled(self) -> bool:
        """Whether nothing that counts can change any more: the settled tokens reach the budget, or
        the end of the sequence or of the canvas."""
        tokens = self._settled.tokens
        room = self._params.max_new_tokens - len(self._tokens)
        ended = any(token in self._params.eos_token_ids for token in tokens)
        return ended or len(tokens) >= min(room, self._length)

    def _scored(self, output: DenoiseOutput, begin: int, tokens: Sequence[int]) -> list[TokenScore]:
        """Return the scores, if they are wanted, of tokens that this step makes final."""
        if not (self._params.logprobs and tokens):
            return []
        assert output.hidden is not None
        hidden = output.hidden[begin : begin + len(tokens)]
        top = self._params.top_logprobs
        return self._model.host_head.scores(hidden, tokens, top, self._step)

    def _finish_block(self, canvas: np.ndarray, settled: int, output: DenoiseOutput) -> list[Event]:
        """Return the events of a block whose first `settled` tokens were sent already."""
        tokens, reason = self._cut(canvas, len(self._steps) + 1)
        scores = self._scored(output, settled, tokens[settled:])
        index, steps = len(self._steps), self._step
        return self._stand(canvas, Block(self.id, index, steps, tokens, reason, settled, scores))

    def _stand(self, canvas: np.ndarray, block: Block) -> list[Event]:
        """Add a block that is final to the answer; return its events."""
        self._steps.append(block.steps)
        self._step = 0
        if self._first_block is None:
            self._first_block = time.perf_counter() - self._added
        self._tokens += block.tokens
        self._scores += block.logprobs
        events: list[Event] = [block]
        if block.finish:
            # Nothing follows the last block, so it is not encoded.
            self.finished = True
            events.append(Finished(self.id, self.result(block.finish)))
        else:
            self.encode_next(canvas)
        return events

    def _cut(self, canvas: np.ndarray, blocks: int) -> tuple[list[int], FinishReason | None]:
        """Return the tokens of the last of `blocks` up to the end of sequence or the budget, and the
        reason if the request ends here."""
        room = self._params.max_new_tokens - len(self._tokens)
        tokens = canvas[:room].tolist()
        ends = np.flatnonzero(np.isin(canvas, self._params.eos_token_ids))
        if ends.size and ends[0] < room:
            return tokens[: ends[0] + 1], "stop"
        return tokens, "length" if blocks == self._blocks else None
