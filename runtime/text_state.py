"""Plain generation, optionally with conditions on positions and with scoring after every block."""

from __future__ import annotations

import numpy as np

from canvasrt.runtime.conditions import Conditions
from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, hidden_input
from canvasrt.runtime.request import Block, Event, FinishReason, Request
from canvasrt.runtime.request_state import RequestState
from canvasrt.runtime.scoring import Scoring

_SCORED = 64  # how many prompt positions to score at a time: each needs the logits of the whole vocabulary


class TextState(RequestState):
    """A request that continues its prompt."""

    def __init__(self, id: int, request: Request, model: Model, added: float) -> None:
        scoring = Scoring(request.params, model) if request.params.scores else None
        watch = None if scoring is None or scoring.by_denoising else scoring.watch
        super().__init__(id, request, model, added, watch)
        self._scoring = scoring
        self._blocks = request.params.blocks(model.config)
        self._conditions = request.conditions or Conditions()
        self._prompt_scores = request.prompt_scores
        if self._prompt_scores is not None:
            self._prompt_scores[:1] = [TokenScore(self.prompt[0], None, (), 0)]
            self.queue.watch_prompt(self._score_prompt, self._prompt_scores)

    def encoded(self) -> list[Event]:
        events = super().encoded()
        return events + self._decide() if self._scoring and self._scoring.scored else events

    def next_step(self) -> DenoiseInput:
        if self._scoring is None or self._scoring.open is None:
            return super().next_step()
        canvas = self._scoring.open.canvas_to_score(self._model.config.pad_token_id)
        return hidden_input(self.row, self._model.first_hidden(canvas))

    def take(self, output: DenoiseOutput) -> list[Event]:
        if self._scoring is None or self._scoring.open is None:
            return super().take(output)
        assert output.hidden is not None
        self._scoring.score(output.hidden[: len(self._scoring.open.tokens)])
        return self._decide()

    def _score_prompt(self, hidden: np.ndarray) -> bool:
        """Score the prompt tokens that a chunk's output, `hidden`, predicts, unless another request has scored them.
        Return True: the chunk stays in the cache."""
        assert self._prompt_scores is not None
        first = self.queue.begin + 1
        if self.queue.is_scored(first + len(hidden) - 1):
            return True
        found: list[TokenScore] = []
        for begin in range(0, len(hidden), _SCORED):
            rows = hidden[begin : begin + _SCORED]
            following = self.prompt[first + begin :][: len(rows)]
            found += self._token_scores(rows[: len(following)], following, 0)
        # Assign by position instead of appending: a request on another GPU may have added the same scores meanwhile.
        self._prompt_scores[first : first + len(found)] = found
        return True

    def _allowed_tokens(self) -> dict[int, np.ndarray]:
        begin, size = len(self._steps) * self._length, self._model.config.vocab_size
        ends = self._params.eos_token_ids
        return self._conditions.allowed(begin, self._length, size, ends)

    def _first_canvas(self) -> np.ndarray:
        begin = len(self._steps) * self._length
        return self._conditions.seeded(super()._first_canvas(), begin)

    def _end_block(self, canvas: np.ndarray, settled: int, step: DenoiseOutput) -> list[Event]:
        tokens, reason = self._cut(canvas)
        logprobs = self._scores_of(step, settled, tokens[settled:])
        index, steps = len(self._steps), self._step
        block = Block(self.id, index, steps, tokens, reason, settled, logprobs)
        if self._scoring is None:
            return self._commit_block(block, canvas)
        judge = self._scoring.begin(block, canvas)
        if judge is not None:
            self.queue.add_trial(np.array(tokens, np.int64), judge)
        return []

    def _decide(self) -> list[Event]:
        """Commit a scored block, or start it again."""
        assert self._scoring is not None
        attempt, encoded = self._scoring.decide()
        if encoded:
            self.queue.keep_trial()
        elif not self._scoring.by_denoising:
            self.queue.drop_trial()
        self._step = 0
        if attempt is None:
            self._attempt += 1
            return []
        self._attempt = 0
        if attempt.block.score is not None:
            self._block_scores.append(attempt.block.score)
        return self._commit_block(attempt.block, attempt.canvas, encoded)

    def _cut(self, canvas: np.ndarray) -> tuple[list[int], FinishReason | None]:
        """Return a block's tokens, up to the end of sequence or the token limit, and the finish reason. The reason is
        None if another block follows."""
        room = self._params.max_new_tokens - len(self._tokens)
        tokens = canvas[:room].tolist()
        ends = np.flatnonzero(np.isin(canvas, self._params.eos_token_ids))
        if ends.size and ends[0] < room:
            return tokens[: ends[0] + 1], "stop"
        return tokens, "length" if len(self._steps) + 1 == self._blocks else None
