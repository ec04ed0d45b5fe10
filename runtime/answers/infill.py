"""Infilling: fills gaps by denoising a canvas whose other positions are pinned."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.layout import end_of_answer
from canvasrt.runtime.host_head import log_softmax
from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.pictures import Picture
from canvasrt.runtime.request import Event, FinishReason, Request, Result
from canvasrt.runtime.request_state import RequestState
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

MAX_VARIANTS = 16
_DIGITS = 4  # maximum digits of a gap's length
_GAP_LENGTH = 2 * _DIGITS + 3  # maximum characters of a gap like {2-4}
_GAP = re.compile(r"\{(\d+)(?:-(\d+))?\}")


@dataclass(frozen=True)
class Gap:
    """A gap of `least` to `most` tokens."""

    least: int
    most: int


def read_gaps(text: str) -> list[str | Gap]:
    """Split a text such as `The cat {4} on the {2-3} mat` into fixed texts and gaps.

    Raises CanvasError for a text without gaps, and for a gap whose length or range is invalid.
    """
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
    """Return the default prompt for a text with gaps."""
    return "Fill in the gaps: " + _GAP.sub("____", text)


@dataclass(frozen=True, kw_only=True)
class InfillRequest(Request):
    """A prompt, and the canvases to fill: one per combination of gap lengths.

    canvases: token ids; −n marks a position of the n-th gap. words: the tokens that gaps can contain, int64.
    """

    canvases: tuple[tuple[int, ...], ...]
    words: np.ndarray
    end: int  # the token that ends the text

    def check(self, model: Model) -> None:
        super().check(model)
        model.host_head.check_signal("leave out the gaps")

    def validate(self, config: ModelConfig, max_context: int) -> None:
        super().validate(config, max_context)
        self.refuse(("logprobs", "score_blocks", "redo_below"), "gaps to fill")


def infill_request(
    text: str,
    prompt: Sequence[int] | np.ndarray,
    params: SamplingParams,
    model: Model,
    tokenizer: Tokenizer,
    pictures: Sequence[Picture] = (),
) -> InfillRequest:
    """Return the request that fills the gaps in `text`. Raises CanvasError for invalid gaps, too many combinations of
    gap lengths, or a text that does not fit a canvas."""
    most = model.canvas_length * (tokenizer.longest_token + _GAP_LENGTH)
    if len(text) > most:
        raise CanvasError(f"infill has {len(text)} characters", f"no canvas holds more than {most}")
    parts = [
        part if isinstance(part, Gap) else tokenizer.encode_text(part) for part in read_gaps(text)
    ]
    gaps = [part for part in parts if isinstance(part, Gap)]
    fixed = sum(len(part) for part in parts if not isinstance(part, Gap))
    config = model.config
    room = params.canvas(config, fixed + sum(gap.most for gap in gaps) + 1)
    _check_length(fixed + sum(gap.least for gap in gaps), room)
    ways = math.prod(gap.most - gap.least + 1 for gap in gaps)
    if ways > MAX_VARIANTS:
        raise CanvasError(
            f"infill has {ways} combinations of gap lengths",
            f"narrow the ranges to at most {MAX_VARIANTS} combinations",
        )
    end = end_of_answer(model, tokenizer)
    canvases = []
    for way in product(*(range(gap.least, gap.most + 1) for gap in gaps)):
        holes = iter([-number] * length for number, length in enumerate(way, 1))
        _check_length(fixed + sum(way), room)
        tokens: list[int] = []
        for part in parts:
            tokens += next(holes) if isinstance(part, Gap) else part
        filler = [config.pad_token_id] * (room - len(tokens) - 1)
        canvases.append((*tokens, end, *filler))
    words = _words(tokenizer, config.vocab_size, config.eos_token_ids)
    params = replace(params, max_new_tokens=room, canvas_length=room, settle_steps=0)
    return InfillRequest(prompt, params, pictures, canvases=tuple(canvases), words=words, end=end)


@lru_cache(maxsize=2)
def _words(tokenizer: Tokenizer, size: int, ends: tuple[int, ...]) -> np.ndarray:
    """Return the tokens that gaps can contain. This takes half a second for 262,144 tokens."""
    words = [token for token in range(size) if tokenizer.token_bytes(token) and token not in ends]
    found = np.array(words, np.int64)
    found.flags.writeable = False
    return found


def _check_length(tokens: int, room: int) -> None:
    """Raise CanvasError if a text of `tokens` tokens, and the token that ends it, exceed a canvas of `room`
    positions."""
    if tokens + 1 > room:
        raise CanvasError(
            f"infill has {tokens} tokens",
            f"a canvas has room for {room - 1}: shorten the text or the gaps",
        )


@dataclass(frozen=True)
class InfillResult(Result):
    """The tokens of the filled text and of every gap. `logprob` is the mean log-probability of the gaps' tokens."""

    gaps: list[list[int]] = field(default_factory=list)
    logprob: float = 0.0


def filled(result: InfillResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a result as JSON: the whole text, the gaps' texts, and the score."""
    return {
        "text": tokenizer.decode(result.token_ids, False),
        "gaps": [tokenizer.decode(gap, False) for gap in result.gaps],
        "logprob": result.logprob,
    }


class InfillState(RequestState):
    """The state of one infill request between passes. Fills one canvas after another. The result is the canvas whose
    gaps have the highest mean log-probability."""

    shows_drafts = False

    def __init__(self, id: int, request: InfillRequest, model: Model, added: float) -> None:
        super().__init__(id, request, model, added)
        self._words, self._end, self._canvases = request.words, request.end, request.canvases
        self._length = len(request.canvases[0])
        self._done: list[tuple[float, np.ndarray]] = []

    def result(self, reason: FinishReason) -> InfillResult:
        """Return the best canvas so far."""
        common = vars(super().result(reason))
        if not self._done:
            return InfillResult(**common)
        best = max(range(len(self._done)), key=lambda each: self._done[each][0])
        score, filled = self._done[best]
        canvas = self._canvases[best]
        length = len(canvas) - 1 - canvas[::-1].index(self._end)
        tokens = [int(token) for token in filled[:length]]
        gaps: list[list[int]] = []
        for place in range(length):
            if canvas[place] < 0:
                if place == 0 or canvas[place - 1] != canvas[place]:
                    gaps.append([])
                gaps[-1].append(tokens[place])
        return InfillResult(**common | {"token_ids": tokens}, gaps=gaps, logprob=score)

    @property
    def _gaps(self) -> np.ndarray:
        """The positions to fill, int64."""
        return np.flatnonzero(np.array(self._canvases[len(self._done)]) < 0)

    def _allowed_tokens(self) -> dict[int, np.ndarray]:
        return {
            place: self._words if token < 0 else np.array([token])
            for place, token in enumerate(self._canvases[len(self._done)])
        }

    def _sample(self, output: DenoiseOutput) -> DenoiseOutput:
        step = super()._sample(output)
        assert step is not None
        # Only the gaps count for early stopping. Other positions are pinned, so their entropy is 0.
        return replace(step, entropy=step.entropy[self._gaps])

    def _end_block(self, canvas: np.ndarray, settled: int, step: DenoiseOutput) -> list[Event]:
        assert step.hidden is not None
        self._done.append((self._score(step.hidden, canvas), canvas))
        self._steps.append(self._step)
        self._step = 0
        return [] if len(self._done) < len(self._canvases) else [self._finish("stop")]

    def _score(self, hidden: np.ndarray, tokens: np.ndarray) -> float:
        """Return the mean log-probability of the gaps' tokens at temperature 1, in nats. Probabilities are relative to
        the tokens that gaps can contain."""
        gaps, words = self._gaps, self._words
        logs = log_softmax(self._model.host_head.logits(hidden[gaps], words))
        columns = np.searchsorted(words, tokens[gaps])
        return float(logs[np.arange(len(gaps)), columns].mean())
