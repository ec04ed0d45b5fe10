"""Decisions: the probabilities of labels, computed by one or a few denoising steps over a template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.host_head import log_softmax
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.request import Event, FinishReason, Request, Result
from canvasrt.runtime.request_state import RequestState

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Fork:
    """A node of the labels' prefix tree: a common prefix, and the tokens that can follow it."""

    prefix: TokenIds
    children: TokenIds  # ascending


@dataclass(frozen=True)
class Labels:
    """The labels of one question as distinct token sequences of equal length."""

    tokens: tuple[TokenIds, ...]

    @property
    def width(self) -> int:
        return len(self.tokens[0])

    @cached_property
    def forks(self) -> tuple[Fork, ...]:
        """The forks of the labels' prefix tree, shallowest first."""
        followers: dict[TokenIds, set[int]] = {}
        for label in self.tokens:
            for depth, token in enumerate(label):
                followers.setdefault(label[:depth], set()).add(token)
        found = [
            Fork(prefix, tuple(sorted(children)))
            for prefix, children in followers.items()
            if len(children) > 1
        ]
        return tuple(sorted(found, key=lambda fork: (len(fork.prefix), fork.prefix)))

    def allowed(self, prefix: TokenIds, offset: int) -> TokenIds:
        """Return, in ascending order, the tokens at index `offset` of the labels that begin with `prefix`."""
        fitting = (label for label in self.tokens if label[: len(prefix)] == prefix)
        return tuple(sorted({label[offset] for label in fitting}))

    def log_probabilities(self, forks: Sequence[np.ndarray]) -> np.ndarray:
        """Return the labels' log-probabilities `[labels]` by the chain rule.

        forks: the log-probabilities of every fork's children, in the order of `self.forks`.
        """
        total = np.zeros(len(self.tokens))
        for number, label in enumerate(self.tokens):
            for fork, logs in zip(self.forks, forks, strict=True):
                depth = len(fork.prefix)
                if label[:depth] == fork.prefix:
                    total[number] += logs[fork.children.index(label[depth])]
        return total


@dataclass(frozen=True)
class Blank:
    """The positions of one question's label on a canvas."""

    question: int
    begin: int
    labels: Labels


@dataclass(frozen=True)
class Template:
    """A canvas: fixed tokens `[length]`, and blanks. The tokens at a blank are ignored."""

    tokens: tuple[int, ...]
    blanks: tuple[Blank, ...]

    @property
    def rounds(self) -> int:
        """Number of rounds: the largest number of forks in any blank's labels. Every round takes one pass per sample
        and step."""
        return max(len(blank.labels.forks) for blank in self.blanks)


def labels_of(labels: Sequence[Sequence[int]], end: int, filler: int, path: str) -> Labels:
    """Pad labels to equal length. If the lengths differ, append `end` to every label, then fill up with `filler`.

    Raises CanvasError for an empty label, or for two labels with the same tokens. The error names `path`, the labels'
    path in the request.
    """
    seen: dict[TokenIds, int] = {}
    for number, label in enumerate(map(tuple, labels)):
        if not label:
            raise CanvasError(f"{path}[{number}] has no tokens", "give each option some text")
        if label in seen:
            raise CanvasError(
                f"{path}[{number}] has the same tokens as {path}[{seen[label]}]",
                "give options that the tokenizer tells apart",
            )
        seen[label] = number
    lengths = {len(label) for label in labels}
    if len(lengths) == 1:
        return Labels(tuple(map(tuple, labels)))
    width = max(lengths) + 1
    closed = (tuple(label) + (end,) for label in labels)
    return Labels(tuple(label + (filler,) * (width - len(label)) for label in closed))


@dataclass(frozen=True, kw_only=True)
class DecisionRequest(Request):
    """A prompt, and the templates whose labels are read after the prompt.

    samples: number of noise samples; every sample reads all templates. Of `params`, only the seed, the temperatures,
    the entropy bound and `max_denoising_steps` (here the number of steps per canvas) apply.
    """

    templates: tuple[Template, ...]
    samples: int = 1

    @property
    def new_tokens(self) -> int:
        return max(len(template.tokens) for template in self.templates)

    def check(self, model: Model) -> None:
        self.validate(model.config, model.max_context)
        if self.pictures:
            model.check_pictures(self.pictures)
        head = model.host_head
        if self.params.max_denoising_steps > 1:
            head.check_signal("ask for one step")

    def validate(self, config: ModelConfig, max_context: int) -> None:
        room = self.new_tokens
        self.check_prompt(config, max_context, room, f"a canvas of {room}")

    def check_limits(self, max_steps: int | None, max_passes: int | None) -> None:
        """Raise CanvasError for more steps or passes than the operator allows. None means no limit."""
        steps = self.params.max_denoising_steps
        if max_steps is not None and steps > max_steps:
            raise CanvasError(f"steps is {steps}", f"this server allows {max_steps}")
        rounds = sum(template.rounds for template in self.templates)
        passes = rounds * self.samples * steps
        if max_passes is not None and passes > max_passes:
            raise CanvasError(
                f"the questions take {passes} denoising passes",
                f"this server allows {max_passes}: use fewer questions, samples or steps",
            )


@dataclass(frozen=True)
class DecisionResult(Result):
    """The probabilities of every question's labels, float64 `[samples, labels]`, in the order of the questions."""

    draws: list[np.ndarray] = field(default_factory=list)


class DecisionState(RequestState):
    """The state of one decision request between passes.

    Round n reads the n-th fork of every question, with the fork's prefix on the canvas. The blanks' other positions
    hold noise.
    """

    shows_drafts = False

    def __init__(self, id: int, request: DecisionRequest, model: Model, added: float) -> None:
        # Canvases never stop early.
        request = replace(request, params=replace(request.params, early_stop=False))
        super().__init__(id, request, model, added)
        self._request = request
        # The sample, template and round of every canvas.
        self._canvases = [
            (draw, template, round)
            for draw, template in product(range(request.samples), request.templates)
            for round in range(template.rounds)
        ]
        self._logs: dict[tuple[int, int, int], np.ndarray] = {}

    def result(self, reason: FinishReason) -> DecisionResult:
        """Return the result so far. It has probabilities only after the last canvas."""
        common = vars(super().result(reason)) | {"steps": [sum(self._steps) + self._step]}
        return DecisionResult(**common, draws=self._draws() if reason == "stop" else [])

    def _allowed_tokens(self) -> dict[int, np.ndarray]:
        _, template, round = self._canvases[len(self._steps)]
        allowed = {i: np.array([token]) for i, token in enumerate(template.tokens)}
        for blank in template.blanks:
            forks = blank.labels.forks
            prefix = forks[round].prefix if round < len(forks) else ()
            for offset in range(blank.labels.width):
                tokens = blank.labels.allowed(prefix, offset)
                allowed[blank.begin + offset] = np.array(tokens, np.int64)
        return allowed

    def _first_canvas(self) -> np.ndarray:
        canvas = super()._first_canvas()
        for place, tokens in self._allowed.items():
            canvas[place] = tokens[0] if len(tokens) == 1 else canvas[place]
        return canvas

    def _noise(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        # All canvases of a sample have the same noise, so an answer does not depend on the questions on other canvases.
        draw, template, _ = self._canvases[len(self._steps)]
        length, size = len(template.tokens), self._model.config.vocab_size
        return step_noise(self._params.seed, draw, step, length, size)

    def _sample(self, output: DenoiseOutput) -> DenoiseOutput | None:
        """Run the sampler; in a canvas's last step, read the labels instead."""
        if self._step < self._params.max_denoising_steps:
            return super()._sample(output)
        assert output.hidden is not None
        draw, template, round = self._canvases[len(self._steps)]
        for blank in template.blanks:
            if round < len(blank.labels.forks):
                fork = blank.labels.forks[round]
                place = blank.begin + len(fork.prefix)
                tokens = np.array(fork.children, np.int64)
                logits = self._model.host_head.logits(output.hidden[place : place + 1], tokens)
                self._logs[draw, blank.question, round] = log_softmax(logits)[0]
        return output

    def _end_block(self, canvas: np.ndarray, settled: int, step: DenoiseOutput) -> list[Event]:
        self._steps.append(self._step)
        self._step = 0
        return [] if len(self._steps) < len(self._canvases) else [self._finish("stop")]

    def _draws(self) -> list[np.ndarray]:
        blanks = [blank for template in self._request.templates for blank in template.blanks]
        found = []
        for blank in sorted(blanks, key=lambda blank: blank.question):
            rows = []
            for draw in range(self._request.samples):
                forks = range(len(blank.labels.forks))
                logs = [self._logs[draw, blank.question, each] for each in forks]
                rows.append(np.exp(blank.labels.log_probabilities(logs)))
            found.append(np.stack(rows))
        return found
