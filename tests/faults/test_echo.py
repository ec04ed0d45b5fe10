"""Log-probabilities of echoed prompts: the limit on their number, and that they are computed once, outside the event
loop."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from canvasrt.containers.openai import app
from canvasrt.containers.openai.chunks import CompletionReply
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.options import FrontOptions, FrontSettings
from canvasrt.containers.openai.tokenize import TokenizeReply
from canvasrt.containers.tensors import MAX_ECHOED, StreamEvent
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.triton.prompt_encoder import PromptEncoder
from canvasrt.containers.triton.replies import ReplyBuilder
from canvasrt.containers.triton.request import read_request
from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.acceptance


def test_an_echo_has_a_bounded_number_of_log_probabilities(model: Model, tokenizer: Tokenizer):
    def read(answers: int, **inputs: Any) -> Any:
        arrays = {"prompt_ids": np.full(2000, 5), "echo": True, "logprobs": True, **inputs}
        arrays = {name: np.atleast_1d(value) for name, value in arrays.items()}
        encoder = PromptEncoder(tokenizer, model.max_context)
        return read_request(arrays, model, encoder, ModelOptions(), "a", answers)

    assert MAX_ECHOED >= 2**18 * 2  # enough for lm-eval: a whole context
    read(131, top_logprobs=1)
    for answers, inputs in ((132, {"top_logprobs": 1}), (13, {"logprob_token_ids": [3] * 20})):
        with pytest.raises(CanvasError, match=f"in {answers} answers, .* gives 5") as refused:
            read(answers, **inputs)
        assert "at most 524288 are allowed: ask for fewer" in refused.value.hint


def test_the_answers_to_an_echoed_prompt_share_its_log_probabilities(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    encoder, shown = PromptEncoder(tokenizer, model.max_context), list[Any]()
    show = ReplyBuilder._show
    monkeypatch.setattr(
        ReplyBuilder, "_show", lambda self, each: shown.append(each) or show(self, each)
    )

    def read(seed: int, owner: str = "a", top: int = 2) -> Any:
        given = {"prompt_ids": np.full(300, 5), "echo": [True], "logprobs": [True], "seed": [seed]}
        arrays = {**given, "top_logprobs": [top], "max_new_tokens": [4]}
        arrays = {name: np.array(value) for name, value in arrays.items()}
        return read_request(arrays, model, encoder, ModelOptions(), owner, 3)

    requests = [read(seed) for seed in range(3)]
    told = requests[0].request.prompt_scores
    assert all(each.request.prompt_scores is told for each in requests)
    for other in (read(0, owner="b"), read(0, top=1)):
        assert other.request.prompt_scores is not told
    generator = Generator(model)
    replies = {generator.add(each.request): each.replies for each in requests}
    finals: list[Any] = []
    while not generator.idle:
        for event in generator.step():
            finals += [
                each for each in replies[event.id].replies(event) if each["event"] == "final"
            ]
    tokens = sum(len(each["token_ids"]) for each in finals)
    assert len(shown) == 300 + tokens
    for each in finals:
        scores = json.loads(each["logprobs"])
        assert [score["token_id"] for score in scores] == [5] * 300 + each["token_ids"]
        assert [score["logprob"] for score in scores[:300]] == [score.logprob for score in told]


class Source:
    """Replaces the model: answers with two thousand log-probabilities."""

    def __init__(self, *given: Any) -> None: ...

    async def stream(self, *given: Any) -> AsyncGenerator[StreamEvent, None]:
        one = {"token_id": 5, "text": "a", "logprob": -1.0, "step": 0, "end": False, "top": []}
        last = {"finish_reason": "length", "steps": [1], "seed": 1, "cached_tokens": 0}
        fields: dict[str, Any] = {"block": 0, "step": 1, **last}
        fields |= {"text": "", "token_ids": [], "prompt_token_ids": []}
        for event in ("block", "final"):
            yield StreamEvent(**fields, event=event, logprobs=json.dumps([one] * 2000))

    async def close(self) -> None: ...


def rendered(
    patch: pytest.MonkeyPatch, source: type[Source], kind: type, method: str, path: str, body: Any
) -> tuple[str, list[str]]:
    """Return the front end's reply to `body`, and the names of the threads on which `method` of class `kind` ran."""
    threads: list[str] = []
    render = getattr(kind, method)

    def shown(self: Any, *given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return render(self, *given)

    patch.setattr(kind, method, shown)
    patch.setattr(app, "Upstream", source)
    settings = FrontSettings(0, "", "", FrontOptions(hosts=("*",)))
    with TestClient(app.make_app(settings, ServerState(phase="serving"))) as client:
        return client.post(path, json=body).text, threads


@pytest.mark.parametrize("stream", [False, True])
def test_long_log_probabilities_are_rendered_on_a_thread(
    stream: bool, monkeypatch: pytest.MonkeyPatch
):
    body = {"model": "canvasrt", "prompt": "a", "echo": True, "logprobs": 0, "stream": stream}
    text, (name,) = rendered(
        monkeypatch, Source, CompletionReply, "scores", "/v1/completions", body
    )
    assert text.count('"token_logprobs"') == 1
    assert name.startswith("canvasrt-")


class Encoder(Source):
    """Replaces the model: answers with a text of many tokens."""

    async def stream(self, *given: Any) -> AsyncGenerator[StreamEvent, None]:
        async for event in super().stream(*given):
            yield replace(event, logprobs="", text=json.dumps({"text": "a" * 100_000}))


def test_long_lists_of_tokens_are_rendered_on_a_thread(monkeypatch: pytest.MonkeyPatch):
    body = {"prompt": "a"}
    text, (name,) = rendered(monkeypatch, Encoder, TokenizeReply, "whole", "/tokenize", body)
    assert text.startswith('{"count"')
    assert name.startswith("canvasrt-")
