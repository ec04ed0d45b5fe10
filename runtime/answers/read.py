"""Reads: one or a few denoising steps over a template give the probabilities of labels."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.template import Fork, Template
from canvasrt.runtime.host_head import log_softmax
from canvasrt.runtime.host_sampler import host_step
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, hidden_input
from canvasrt.runtime.pictures import Picture, groups_of
from canvasrt.runtime.prompted import Prompted
from canvasrt.runtime.request import Event, Finished, FinishReason, Result, Timings
from canvasrt.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class ReadRequest:
    """A prompt, and templates whose labels are to be read over it.

    samples: draws of noise; each reads every template. params: its seed, its temperatures, its
    entropy bound and, as `max_denoising_steps`, how many steps lead to each read.
    """

    prompt_token_ids: Sequence[int]
    templates: tuple[Template, ...]
    params: SamplingParams
    samples: int = 1
    owner: str = ""  # the caller, between whom the passes are shared
    pictures: Sequence[Picture] = ()  # one for each run of image tokens in the prompt

    def validate(self, config: ModelConfig, max_context: int) -> None:
        """Raise CanvasError for an empty or foreign prompt, or one that does not fit the context."""
        groups_of(self.prompt_token_ids, self.pictures, config)
        count, room = len(self.prompt_token_ids), max(len(t.tokens) for t in self.templates)
        if not count or not all(0 <= t < config.vocab_size for t in self.prompt_token_ids):
            raise CanvasError(
                "the prompt is empty or has tokens that are not in the vocabulary",
                f"give token ids from 0 to {config.vocab_size - 1}",
            )
        if count + room > max_context:
            raise CanvasError(
                f"the prompt of {count} tokens and a canvas of {room} exceed the context of "
                f"{max_context} tokens",
                f"shorten the prompt to {max_context - room} tokens",
            )

    def check_limits(self, max_steps: int | None, max_passes: int | None) -> None:
        """Raise CanvasError for more steps or passes than an operator allows; None is no limit."""
        steps = self.params.max_denoising_steps
        if max_steps is not None and steps > max_steps:
            raise CanvasError(f"steps is {steps}", f"this server allows {max_steps}")
        rounds = sum(template.rounds for template in self.templates)
        passes = rounds * self.samples * steps
        if max_passes is not None and passes > max_passes:
            raise CanvasError(
                f"the questions take {passes} denoising passes",
                f"this server allows {max_passes}: ask fewer questions, samples or steps",
            )


@dataclass(frozen=True)
class ReadResult(Result):
    """Probabilities per question, in the questions' order, float64 `[samples, labels]`."""

    draws: list[np.ndarray] = field(default_factory=list)


class ActiveRead(Prompted):
    """The state of one read between passes; the generator treats it like any running request.

    Every question is read at its first fork in the first round, at its second fork in the second,
    and so on, with the fork's prefix in place. Other positions of the slots hold noise.
    """

    def __init__(self, id: int, request: ReadRequest, model: Model, added: float) -> None:
        super().__init__(request.prompt_token_ids, model, request.pictures)
        self.id = id
        self.finished = False
        self._request = request
        self._added = added
        self._reads = self._order()
        self._read = next(self._reads)
        self._step = 0
        self._passes = 0
        self._logs: dict[tuple[int, int, int], np.ndarray] = {}

    def next_step(self) -> DenoiseInput:
        """Return the input of the next denoising step."""
        if self._step == 0:
            self._hidden = self._model.first_hidden(self._first_canvas())
        self._step += 1
        self._passes += 1
        return hidden_input(self.row, self._hidden)

    def take(self, output: DenoiseOutput) -> list[Event]:
        """Apply the result of that step; the last one reads the labels."""
        assert output.hidden is not None
        if self._step < self._request.params.max_denoising_steps:
            self._hidden = self._next_hidden(output.hidden)
            return []
        self._keep(output.hidden)
        self._step = 0
        following = next(self._reads, None)
        if following is None:
            self.finished = True
            return [Finished(self.id, self.result("stop"))]
        self._read = following
        return []

    def result(self, reason: FinishReason) -> ReadResult:
        """Return the result so far: no probabilities before the end."""
        return ReadResult(
            token_ids=[],
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            seed=self._request.params.seed,
            steps=[self._passes],
            timings=Timings(None, time.perf_counter() - self._added),
            cached_tokens=self.cached,
            draws=self._draws() if reason == "stop" else [],
        )

    def _order(self) -> Iterator[tuple[int, Template, int]]:
        """Yield draw, template and round of every read."""
        for draw, template in product(range(self._request.samples), self._request.templates):
            for round in range(template.rounds):
                yield draw, template, round

    def _forks(self) -> Iterator[tuple[int, int, Fork]]:
        """Yield question, begin and fork of every slot that is read now."""
        _, template, round = self._read
        for slot in template.slots:
            if round < len(slot.labels.forks):
                yield slot.question, slot.begin, slot.labels.forks[round]

    def _noise(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        # The same noise for every template and round of a draw: an answer does not depend on how
        # many other questions there are on other canvases.
        draw, template, _ = self._read
        length, size = len(template.tokens), self._model.config.vocab_size
        return step_noise(self._request.params.seed, draw, step, length, size)

    def _allowed(self) -> dict[int, np.ndarray]:
        """Return the tokens that may stand at each position."""
        _, template, round = self._read
        allowed = {i: np.array([token]) for i, token in enumerate(template.tokens)}
        for slot in template.slots:
            forks = slot.labels.forks
            prefix = forks[round].prefix if round < len(forks) else ()
            for offset in range(slot.labels.width):
                tokens = slot.labels.allowed(prefix, offset)
                allowed[slot.begin + offset] = np.array(tokens, np.int64)
        return allowed

    def _first_canvas(self) -> np.ndarray:
        noise = self._noise(0)[1]
        return np.array(
            [
                tokens[0] if len(tokens) == 1 else noise[position]
                for position, tokens in sorted(self._allowed().items())
            ],
            np.int64,
        )

    def _next_hidden(self, hidden: np.ndarray) -> np.ndarray:
        params, (uniforms, noise) = self._request.params, self._noise(self._step)
        return host_step(
            self._model.host_head,
            hidden,
            self._allowed(),
            params,
            self._step,
            uniforms,
            noise,
        ).next_hidden

    def _keep(self, hidden: np.ndarray) -> None:
        """Keep the log-probabilities of what may follow at each fork."""
        draw, _, round = self._read
        for question, begin, fork in self._forks():
            place = begin + len(fork.prefix)
            tokens = np.array(fork.children, np.int64)
            logits = self._model.host_head.logits(hidden[place : place + 1], tokens)
            self._logs[draw, question, round] = log_softmax(logits)[0]

    def _draws(self) -> list[np.ndarray]:
        slots = [slot for template in self._request.templates for slot in template.slots]
        found = []
        for slot in sorted(slots, key=lambda slot: slot.question):
            rows = []
            for draw in range(self._request.samples):
                forks = range(len(slot.labels.forks))
                logs = [self._logs[draw, slot.question, each] for each in forks]
                rows.append(np.exp(slot.labels.log_probabilities(logs)))
            found.append(np.stack(rows))
        return found
