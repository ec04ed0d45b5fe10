"""Infilling: gaps between fixed texts, written by denoising a canvas whose other places are pinned."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.early_stop import EarlyStopping
from canvasrt.runtime.host_head import log_softmax
from canvasrt.runtime.host_sampler import host_step
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, hidden_input
from canvasrt.runtime.pictures import Picture
from canvasrt.runtime.prompted import Prompted
from canvasrt.runtime.request import Event, Finished, FinishReason, Request, Result, Timings
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

MAX_VARIANTS = 16
_DIGITS = 4  # of a gap's lengths
_GAP_LENGTH = 2 * _DIGITS + 3  # characters
_GAP = re.compile(r"\{(\d+)(?:-(\d+))?\}")


@dataclass(frozen=True)
class Gap:
    """A place to fill, with at least and at most so many tokens."""

    least: int
    most: int


def read_gaps(text: str) -> list[str | Gap]:
    """Return the texts and gaps of `The cat {4} on the {2-3} mat`. CanvasError without a gap, or for
    one that has no tokens."""
    parts: list[str | Gap] = []
    end = 0
    for match in _GAP.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        low, high = match[1], match[2] or match[1]
        gap = Gap(int(low[-_DIGITS:]), int(high[-_DIGITS:]))
        if max(len(low), len(high)) > _DIGITS or not 1 <= gap.least <= gap.most:
            raise CanvasError(
                f"infill has the gap {match[0][:40]}",
                "give a number of tokens, or a range like {2-4}",
            )
        parts.append(gap)
        end = match.end()
    if end < len(text):
        parts.append(text[end:])
    if not any(isinstance(part, Gap) for part in parts):
        raise CanvasError("infill has no gap", "write {4} where 4 tokens are missing")
    return parts


def default_prompt(text: str) -> str:
    """Return what to ask a chat for when a caller gives nothing but a text with gaps."""
    return "Fill in the gaps: " + _GAP.sub("____", text)


@dataclass(frozen=True)
class GapRequest:
    """A prompt, and canvases to fill: one for each way to choose the gaps' lengths.

    canvases: tokens, with −1 in the gaps. words: the tokens that may stand in a gap, int64.
    """

    prompt_token_ids: Sequence[int] | np.ndarray
    params: SamplingParams
    canvases: tuple[tuple[int, ...], ...]
    words: np.ndarray
    end: int  # the last of these tokens ends the text
    pictures: Sequence[Picture] = ()  # one for each run of image tokens in the prompt
    owner: str = ""  # the caller, between whom the passes are shared

    def validate(self, config: ModelConfig, max_context: int) -> None:
        """Raise CanvasError for a prompt that is empty, foreign or too long."""
        Request(self.prompt_token_ids, self.params, self.pictures).validate(config, max_context)
        for name in ("score_blocks", "redo_below"):
            if getattr(self.params, name):
                raise CanvasError(
                    f"{name} is not supported together with gaps to fill", f"leave out {name}"
                )


def infill_request(
    text: str,
    prompt: Sequence[int] | np.ndarray,
    params: SamplingParams,
    model: Model,
    tokenizer: Tokenizer,
    pictures: Sequence[Picture] = (),
) -> GapRequest:
    """Return the request that fills the gaps in `text`. CanvasError if it does not fit a canvas."""
    most = model.canvas_length * (tokenizer.longest_token + _GAP_LENGTH)
    if len(text) > most:
        raise CanvasError(
            f"infill has {len(text)} characters", f"no canvas has room for more than {most}"
        )
    parts = [
        part if isinstance(part, Gap) else tokenizer.encode(part, False) for part in read_gaps(text)
    ]
    gaps = [part for part in parts if isinstance(part, Gap)]
    fixed = sum(len(part) for part in parts if not isinstance(part, Gap))
    config = model.config
    room = params.canvas(config, fixed + sum(gap.most for gap in gaps) + 1)
    _check_length(fixed + sum(gap.least for gap in gaps), room)
    ways = math.prod(gap.most - gap.least + 1 for gap in gaps)
    if ways > MAX_VARIANTS:
        raise CanvasError(
            f"infill leaves {ways} ways to choose the gaps' lengths",
            f"narrow the ranges to at most {MAX_VARIANTS} ways",
        )
    end = config.eos_token_ids[-1]
    canvases = []
    for way in product(*(range(gap.least, gap.most + 1) for gap in gaps)):
        lengths = iter(way)
        _check_length(fixed + sum(way), room)
        tokens: list[int] = []
        for part in parts:
            tokens += [-1] * next(lengths) if isinstance(part, Gap) else part
        filler = [config.pad_token_id] * (room - len(tokens) - 1)
        canvases.append((*tokens, end, *filler))
    words = _words(tokenizer, config.vocab_size, config.eos_token_ids)
    params = replace(params, max_new_tokens=room, canvas_length=room)
    return GapRequest(prompt, params, tuple(canvases), words, end, pictures)


@lru_cache(maxsize=2)
def _words(tokenizer: Tokenizer, size: int, ends: tuple[int, ...]) -> np.ndarray:
    """Return the tokens that may stand in a gap. For 262,144 tokens, that takes half a second."""
    words = [token for token in range(size) if tokenizer.token_bytes(token) and token not in ends]
    found = np.array(words, np.int64)
    found.flags.writeable = False
    return found


def _check_length(tokens: int, room: int) -> None:
    """Raise CanvasError for a text with its gaps that a canvas of `room` positions does not hold."""
    if tokens + 1 > room:
        raise CanvasError(
            f"infill has {tokens} tokens",
            f"a canvas has room for {room - 1}: shorten the text or the gaps",
        )


@dataclass(frozen=True)
class InfillResult(Result):
    """The filled text's tokens, and each gap's; `logprob` is the gaps' mean log-probability."""

    gaps: list[list[int]] = field(default_factory=list)
    logprob: float = 0.0


def filled(result: InfillResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a result as callers see it: the whole text, the gaps' texts, and the score."""
    return {
        "text": tokenizer.decode(result.token_ids, False),
        "gaps": [tokenizer.decode(gap, False) for gap in result.gaps],
        "logprob": result.logprob,
    }


class ActiveInfill(Prompted):
    """The state of one infill between passes. Canvases are filled one after another, and the one
    whose gaps are likeliest per token is kept."""

    def __init__(self, id: int, request: GapRequest, model: Model, added: float) -> None:
        super().__init__(request.prompt_token_ids, model, request.pictures)
        self.id = id
        self.finished = False
        self._request, self._params = request, request.params
        self._added = added
        self._done: list[tuple[float, np.ndarray]] = []
        self._steps: list[int] = []
        self._step = 0
        self._early = EarlyStopping(self._params)

    def next_step(self) -> DenoiseInput:
        """Return the input of the next denoising step."""
        if self._step == 0:
            self._hidden = self._model.first_hidden(self._noise(0)[1])
            self._early.start_block()
        self._step += 1
        return hidden_input(self.row, self._hidden)

    def take(self, output: DenoiseOutput) -> list[Event]:
        """Apply the result of that step; the last one of the last canvas ends the request."""
        assert output.hidden is not None
        params, (uniforms, noise) = self._params, self._noise(self._step)
        step = host_step(
            self._model.host_head,
            output.hidden,
            self._allowed(),
            params,
            self._step,
            uniforms,
            noise,
        )
        self._hidden = step.next_hidden
        # Only the gaps count: the other positions are pinned, and their entropy is 0.
        gaps = np.array(self._canvas) < 0
        stops = self._early.stops(step.argmax, step.entropy[gaps])
        if not stops and self._step < params.max_denoising_steps:
            return []
        self._done.append((self._score(output.hidden, step.argmax), step.argmax))
        self._steps.append(self._step)
        self._step = 0
        if len(self._done) < len(self._request.canvases):
            return []
        self.finished = True
        return [Finished(self.id, self.result("stop"))]

    def result(self, reason: FinishReason) -> InfillResult:
        """Return the best canvas so far."""
        score, tokens, gaps = 0.0, list[int](), list[list[int]]()
        if self._done:
            best = max(range(len(self._done)), key=lambda each: self._done[each][0])
            score, filled = self._done[best]
            canvas = self._request.canvases[best]
            length = len(canvas) - 1 - canvas[::-1].index(self._request.end)
            tokens = [int(token) for token in filled[:length]]
            for place in range(length):
                if canvas[place] < 0:
                    if place == 0 or canvas[place - 1] >= 0:
                        gaps.append([])
                    gaps[-1].append(tokens[place])
        return InfillResult(
            token_ids=tokens,
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            seed=self._params.seed,
            steps=self._steps,
            timings=Timings(None, time.perf_counter() - self._added),
            cached_tokens=self.cached,
            gaps=gaps,
            logprob=score,
        )

    @property
    def _canvas(self) -> tuple[int, ...]:
        return self._request.canvases[len(self._done)]

    def _allowed(self) -> dict[int, np.ndarray]:
        words = self._request.words
        return {
            place: words if token < 0 else np.array([token])
            for place, token in enumerate(self._canvas)
        }

    def _noise(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a step's uniforms, and tokens that may stand at their places."""
        size, words = self._model.config.vocab_size, self._request.words
        seed, block = self._params.seed, len(self._done)
        uniforms, tokens = step_noise(seed, block, step, len(self._canvas), size)
        fixed = np.array(self._canvas)
        return uniforms, np.where(fixed < 0, words[tokens * len(words) // size], fixed)

    def _score(self, hidden: np.ndarray, tokens: np.ndarray) -> float:
        """Return the mean log-probability of the gaps' tokens at temperature 1, in nats."""
        places = np.flatnonzero(np.array(self._canvas) < 0)
        words = self._request.words
        logs = log_softmax(self._model.host_head.logits(hidden[places], words))
        columns = np.searchsorted(words, tokens[places])
        return float(logs[np.arange(len(places)), columns].mean())
