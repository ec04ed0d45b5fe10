"""Long bodies with very many errors are refused at the first error, and take about as much CPU time as good bodies."""

from __future__ import annotations

import json
import time
from functools import cache

import pytest

from canvasrt.containers.openai.anthropic import MessagesRequest
from canvasrt.containers.openai.body import Body, read_body
from canvasrt.containers.openai.chat import CompletionRequest, completion_generation
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.fields import Ignored
from canvasrt.containers.openai.ollama import OllamaChat
from canvasrt.containers.openai.responses import ResponsesRequest
from canvasrt.containers.openai.tokenize import DetokenizeRequest, TokenizeRequest
from canvasrt.containers.openai.tools import ChatRequest
from canvasrt.containers.tensors import MAX_CANVAS
from canvasrt.containers.triton.prompt_encoder import is_long
from canvasrt.containers.triton.request import read_conditions_of
from canvasrt.errors import CanvasError

SIZE = 1_000_000  # bytes; has the most values that a body may have, and takes 1/8 s
CHAT = b'{"model":"m","messages":[{"role":"user","content":"a"}],'
OBJECTS = b"{}," * (SIZE // 3) + b"{}"
NUMBERS = b"1," * (SIZE // 2) + b"1"
MEMBERS = b",".join(b'"k%d":1' % i for i in range(SIZE // 11))
BODIES: dict[str, tuple[type[Body], bytes]] = {
    "ids that are objects": (DetokenizeRequest, b'{"tokens":[' + OBJECTS + b"]}"),
    "messages that are numbers": (TokenizeRequest, b'{"messages":[' + NUMBERS + b"]}"),
    "a chat of numbers": (ChatRequest, b'{"model":"m","messages":[' + NUMBERS + b"]}"),
    "items that are numbers": (ResponsesRequest, b'{"model":"m","input":[' + NUMBERS + b"]}"),
    "prompts that are objects": (CompletionRequest, b'{"model":"m","prompt":[' + OBJECTS + b"]}"),
    "tools that are empty": (ChatRequest, CHAT + b'"tools":[' + OBJECTS + b"]}"),
    "stops that are numbers": (ChatRequest, CHAT + b'"stop":[' + NUMBERS + b"]}"),
    "choices that are numbers": (ChatRequest, CHAT + b'"guided_choice":[' + NUMBERS + b"]}"),
    "blocks that are numbers": (MessagesRequest, CHAT + b'"system":[' + NUMBERS + b"]}"),
    "tools that may be called": (
        ChatRequest,
        CHAT + b'"tool_choice":{"type":"allowed_tools","allowed_tools":'
        b'{"mode":"auto","tools":[' + NUMBERS + b"]}}}",
    ),
    "unknown parameters": (ChatRequest, CHAT + MEMBERS + b"}"),
    "metadata of numbers": (ChatRequest, CHAT + b'"metadata":{' + MEMBERS + b"}}"),
    "unknown options of Ollama's": (OllamaChat, CHAT + b'"options":{' + MEMBERS + b"}}"),
    "unknown options": (ChatRequest, CHAT + b'"stream_options":{' + MEMBERS + b"}}"),
}


@pytest.mark.parametrize("name", BODIES)
def test_many_mistakes_cost_little_more_than_one(name: str) -> None:
    kind, body = BODIES[name]
    begin = time.process_time()
    with pytest.raises(ApiError) as refused:
        read_body(kind, body)
    # Collecting all errors would take 8 to 50 times as long as a good body.
    assert time.process_time() - begin < 6 * good_seconds()
    assert refused.value.status == 400


@cache
def good_seconds() -> float:
    """Return the CPU seconds for a good body as large as the wrong ones."""
    begin = time.process_time()
    for _ in range(2):
        read_body(DetokenizeRequest, b'{"tokens":[' + NUMBERS + b"]}")
    return (time.process_time() - begin) / 2


def test_nor_where_unsupported_parameters_are_left_out() -> None:
    begin = time.process_time()
    with pytest.raises(ApiError, match="members"):
        read_body(ChatRequest, CHAT + MEMBERS + b"}", Ignored(lenient=True))
    assert time.process_time() - begin < 6 * good_seconds()


def test_a_canvas_is_bounded_before_it_is_read() -> None:
    canvas = '{"seed":[' + "123," * (MAX_CANVAS // 4) + "1]}"
    with pytest.raises(ApiError, match="canvas has") as refused:
        read_body(ChatRequest, CHAT + b'"canvas":' + canvas.encode() + b"}")
    assert refused.value.param == "canvas"
    with pytest.raises(CanvasError, match="canvas has"):
        read_conditions_of({"canvas": canvas})
    assert is_long({"canvas": canvas[: MAX_CANVAS // 2]})


@pytest.mark.parametrize(
    "length", [{"diffusion_canvas_length": 2**31 - 1}, {"canvas_length": 2**31 - 1}, {}]
)
def test_allowed_tokens_are_counted_before_they_are_listed(length: dict[str, int]) -> None:
    """A list of two billion positions would take all memory."""
    body = {
        "model": "m",
        "prompt": "a",
        "diffusion_constrained": True,
        "logprob_token_ids": [3] * 128,
    }
    read = json.dumps({**body, "diffusion_seed_canvas": [5] * 513, **length}).encode()
    with pytest.raises(ApiError, match="at most 65536 are allowed together") as refused:
        completion_generation(read_body(CompletionRequest, read))
    assert refused.value.param == "diffusion_constrained"
