"""Errors that the model reports, and the parameter that each names. test_refusals.py tests what the front end
refuses."""

from __future__ import annotations

from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from tests.helpers.alone import lone_front
from tests.helpers.serving import needs_triton

QUESTION = [{"role": "user", "content": "12+34="}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
LONG = "context_length_exceeded"
SCHEMA = "response_format.json_schema.schema"
COSTLY = {"type": "string", "allOf": [{"pattern": f"^(.*{c}.*){{2}}$"} for c in "abcdefgh"]}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def by_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


# Fields of a chat, the parameter that the error names, and a text in its message.
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"top_logprobs": 2}, "top_logprobs", "add logprobs"),
    ({"logit_bias": {"112": 1}}, "logit_bias", "from 0 to 111"),
    ({"canvas_length": 3}, "canvas_length", "give one of 4, 8, 16, 32"),
    ({"canvas": {"pin": {"2": 112}}}, "canvas.pin.2", "from 0 to 111"),
    (
        {"canvas": {"pin": {"2": 9}}, "response_format": {"type": "json_object"}},
        "canvas",
        "not supported with grammar",
    ),
    (by_schema({}) | {"score_blocks": True}, "score_blocks", "not supported together with"),
    (by_schema(3), SCHEMA, "not an object"),
    (by_schema(COSTLY), SCHEMA, "takes more than llguidance allows"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format.regex", "("),
    ({"guided_regex": "("}, "guided_regex", "guided_regex cannot be used"),
    ({"max_tokens": 4097}, "max_tokens", "from 1 to 4096 for max_tokens"),
    ({"max_completion_tokens": 4097}, "max_completion_tokens", "4096"),
    (
        {"chat_template_kwargs": {"colour": 1}},
        "chat_template_kwargs.colour",
        "chat_template_kwargs.colour is not a variable",
    ),
    (
        {"chat_template_kwargs": {"a": 1}},
        "chat_template_kwargs.a",
        "chat_template_kwargs.a is not a variable of the model's chat template",
    ),
    *(
        (
            {"chat_template_kwargs": {name: "a"}},
            f"chat_template_kwargs.{name}",
            "callers cannot set",
        )
        for name in ("messages", "bos_token")
    ),
    (user([IMAGE]), "messages", "chat template wrote 0"),
    (user("x" * 9000), "messages", "9016 tokens"),
    ({"max_tokens": 4096, **user("x" * 100)}, "messages", "at most 3968 new tokens"),
]


@needs_triton
@pytest.mark.parametrize(("fields", "param", "says"), CHATS, ids=lambda each: str(each)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(openai: OpenAI, fields: dict[str, Any], param: str, says: str, stream: bool):
    body = {"model": "canvasrt", "messages": QUESTION, "stream": stream, **fields}
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.post("/chat/completions", body=body, cast_to=object)
    error = caught.value
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert error.code == (LONG if "new tokens" in says or "9016" in says else "invalid_value")
    assert error.param == param
    assert says in error.body["message"]  # type: ignore[index, call-overload]


@needs_triton
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [112]}, "prompt"),
        ({"prompt": "x" * 9000}, "prompt"),
        ({"echo": True, "logprobs": 1, "score_blocks": True}, "score_blocks"),
        ({"echo": True, "logprobs": 1, "guided_regex": "a"}, "echo"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 3, "guided_regex": "a"}, "min_tokens"),
        ({"diffusion_seed_canvas": [112]}, "diffusion_seed_canvas"),
        ({"diffusion_canvas_length": 3}, "diffusion_canvas_length"),
        ({"vllm_xargs": {"diffusion_max_steps": 0}}, "diffusion_max_steps"),
    ],
    ids=str,
)
def test_a_completion(openai: OpenAI, fields: dict[str, Any], param: str):
    with pytest.raises(sdk.BadRequestError) as caught:
        body = {"model": "canvasrt", "prompt": "a", **fields}
        openai.post("/completions", body=body, cast_to=object)
    assert caught.value.param == param


@needs_triton
def test_an_unknown_model_is_not_found(openai: OpenAI):
    with pytest.raises(sdk.NotFoundError):
        openai.chat.completions.create(model="gpt", messages=QUESTION)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({"Authorization": "Bearer first"}, 503),  # the key is valid, but there is no model
        ({"Authorization": "Bearer zweiter Schlüssel".encode()}, 503),
        ({"x-api-key": "first"}, 503),
        ({"Authorization": "Bearer firs"}, "invalid_api_key"),
        ({"x-api-key": "other"}, "invalid_api_key"),
        ({}, None),
    ],
    ids=str,
)
def test_keys_are_asked_for_where_there_are_some(header: dict[str, Any], code: Any):
    chat = {"model": "canvasrt", "messages": QUESTION, "max_tokens": 5}
    lists = ("/v1/models", "/v1/models/canvasrt", "/api/tags", "/api/ps")
    asks = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/api/show")
    with lone_front(keys=("first", "zweiter Schlüssel")) as front:
        for path in (*lists, *asks):
            how = {"method": "GET"} if path in lists else {"method": "POST", "json": chat}
            reply = front.request(url=path, headers=header, **how)
            if code == 503:
                assert reply.status_code == (200 if path in (*lists, "/api/show") else 503)
                continue
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            if path == "/v1/messages":
                assert reply.json()["error"]["type"] == "authentication_error"
            elif not path.startswith("/api/"):
                assert reply.json()["error"]["code"] == code
