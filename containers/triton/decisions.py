"""Closed questions that came as a tensor, and answers as tensors whose text is JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from canvasrt.containers.tensors import check_messages, read_json
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.infill import InfillResult, filled
from canvasrt.runtime.answers.layout import Ask
from canvasrt.runtime.answers.read import ReadRequest, ReadResult
from canvasrt.runtime.generator import Event, Finished, Result
from canvasrt.runtime.model import Model
from canvasrt.runtime.pictures import Picture
from canvasrt.runtime.tokenizer import Tokenizer


def read_decisions(
    values: Mapping[str, Any],
    model: Model,
    tokenizer: Tokenizer | None,
    pictures: Sequence[Picture] = (),
) -> tuple[Ask, ReadRequest]:
    """Return the questions of a caller's inputs, and the read that answers them. CanvasError names
    the path of what is wrong."""
    if tokenizer is None or not tokenizer.has_template:
        raise CanvasError("questions need a tokenizer with a chat template", "send a prompt alone")
    if "prompt_ids" in values or values.get("raw"):
        raise CanvasError("questions are asked about a chat", "send prompt or messages")
    data = read_json(
        "questions", values["questions"], "send a JSON list of questions, or an object"
    )
    ask = Ask.from_json({"questions": data} if isinstance(data, list) else data)
    if "messages" in values:
        messages = check_messages(values["messages"])
    else:
        messages = [{"role": "user", "content": values["prompt"]}]
    return ask, ask.request(messages, model, tokenizer, int(values.get("seed") or 0), pictures)


class _Replies(ABC):
    """Builds the one reply to a request, whose text is JSON."""

    ended = False

    def replies(self, event: Event) -> list[dict[str, np.ndarray]]:
        """Return the replies to an event, as output tensors by name."""
        self.ended = isinstance(event, Finished)
        if not isinstance(event, Finished) or event.result.finish_reason == "cancelled":
            return []
        return [text_reply(event.result, self._shown(event.result))]

    @abstractmethod
    def _shown(self, result: Result) -> Mapping[str, Any]:
        """Return what a result's text holds."""


class DecisionReplies(_Replies):
    """For a request with questions: the text is the answers."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def _shown(self, result: Result) -> Mapping[str, Any]:
        assert isinstance(result, ReadResult)
        return {"answers": self._ask.answers(result.draws)}


class InfillReplies(_Replies):
    """For an infill: the text is the filled text, the gaps and their score."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def _shown(self, result: Result) -> Mapping[str, Any]:
        assert isinstance(result, InfillResult)
        assert self._tokenizer is not None
        return filled(result, self._tokenizer)


def text_reply(result: Result, shown: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the one reply to a request whose text is JSON."""
    text = json.dumps(shown, ensure_ascii=False)
    return {
        "event": np.array([b"final"], object),
        "block": np.zeros(1, np.int32),
        "step": np.array(result.steps[-1:] or [0], np.int32),
        "text": np.array([text.encode()], object),
        "token_ids": np.array(result.token_ids, np.int32),
        "prompt_token_ids": np.array(result.prompt_token_ids, np.int32),
        "finish_reason": np.array([b"stop"], object),
        "steps": np.array(result.steps, np.int32),
        "seed": np.array([result.seed], np.uint64),
        "cached_tokens": np.array([result.cached_tokens], np.int32),
        "logprobs": np.array([b""], object),
    }
