"""The front end's refusals: their status, and the parameter that they name."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
QUESTION = [{"role": "user", "content": "12+34="}]
UNSUPPORTED = "unsupported_parameter"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def by_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
COSTLY = {"type": "string", "allOf": [{"pattern": f"^(.*{c}.*){{2}}$"} for c in "abcdefgh"]}
SCHEMA = "response_format.json_schema.schema"
# Fields of a chat → (the parameter that is named, the code, what the message says).
CASES: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"temperature": True}, "temperature", "invalid_type", "temperature"),
    ({"temperature": -1}, "temperature", "invalid_value", "temperature is -1"),
    ({"top_p": True}, "top_p", "invalid_type", "valid number"),
    ({"top_p": 1.5}, "top_p", "invalid_value", "from 0 to 1"),
    ({"min_p": -0.5}, "min_p", "invalid_value", "from 0 to 1"),
    ({"top_k": -2}, "top_k", "invalid_value", "greater than or equal to -1"),
    ({"presence_penalty": 0.5}, "presence_penalty", UNSUPPORTED, "or send 0"),
    ({"frequency_penalty": -1}, "frequency_penalty", UNSUPPORTED, "or send 0"),
    ({"logit_bias": {"3": "x"}}, "logit_bias.3", "invalid_type", "valid number"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "not a token id"),
    ({"logit_bias": {"3": 101}}, "logit_bias", "invalid_value", "from -100 to 100"),
    ({"logit_bias": {"112": 1}}, "logit_bias", "invalid_value", "from 0 to 111"),
    ({"canvas_length": 3}, "canvas_length", "invalid_value", "canvases of 4, 8, 16, 32"),
    ({"canvas_length": -2}, "canvas_length", "invalid_value", "greater than or equal to -1"),
    ({"canvas": 3}, "canvas", "invalid_type", "should be an object"),
    ({"canvas": {"pins": {}}}, "canvas.pins", "invalid_value", "seed, pin, allow"),
    ({"canvas": {"pin": {"4096": 9}}}, "canvas.pin.4096", "invalid_value", "out of range"),
    ({"canvas": {"pin": {"2": 112}}}, "canvas.pin.2", "invalid_value", "from 0 to 111"),
    ({"canvas": {"allow": {"2": []}}}, "canvas.allow.2", "invalid_value", "allows no token"),
    (
        {"canvas": {"pin": {"2": 9}, "allow": {"2": [8]}}},
        "canvas.pin.2",
        "invalid_value",
        "does not list",
    ),
    (
        {"canvas": {"pin": {"2": 9}}, "response_format": {"type": "json_object"}},
        "canvas",
        "invalid_value",
        "not supported with grammar",
    ),
    ({"logprobs": 2}, "logprobs", "invalid_type", "valid boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "add logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "equal to 20"),
    (
        {"tools": [{"type": "function"}]},
        "tools[0].function",
        "missing_required_parameter",
        "function",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "needs tools"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value", "'none', 'auto'"),
    ({"bad_words": ["x"]}, "bad_words", UNSUPPORTED, "Leave it out"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value", "'none', 'minimal'"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "give one of"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
        "invalid_value",
        "not an object",
    ),
    (
        {"response_format": {"type": "regex", "regex": "("}},
        "response_format.regex",
        "invalid_value",
        "(",
    ),
    (
        by_schema({"type": "string", "minLength": 5, "maxLength": 2}),
        SCHEMA,
        "invalid_value",
        "Unsat",
    ),
    (by_schema({"$ref": "#"}), SCHEMA, "invalid_value", "no token may follow"),
    (by_schema(ENDLESS), SCHEMA, "invalid_value", "no answer of at most 2048 tokens"),
    (by_schema(COSTLY), SCHEMA, "invalid_value", "takes more than llguidance allows"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "greater than or equal to 1"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type", "valid integer"),
    ({"max_tokens": 4097}, "max_tokens", "invalid_value", "from 1 to 4096 for max_tokens"),
    ({"max_completion_tokens": 4097}, "max_completion_tokens", "invalid_value", "4096"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value", "disagree"),
    (
        {"max_tokens": 4096, "messages": user("x" * 100)},
        "messages",
        "context_length_exceeded",
        "at most 3968 new tokens",
    ),
    ({"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
    ({"n": 1000}, "n", "invalid_value", "128"),
    (
        {"seed": -(2**63) - 1},
        "seed",
        "invalid_value",
        "greater than or equal to -9223372036854775808",
    ),
    ({"seed": 2**64}, "seed", "invalid_value", "18446744073709551615"),
    ({"seed": 2**64 - 1, "n": 2}, "seed", "invalid_value", "below"),
    ({"stop": ["a", 3]}, "stop[1]", "invalid_type", "string"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value", "at most 16"),
    ({"guided_grammar": "root ::= b"}, "guided_grammar", "invalid_value", "Rule 'b' not found"),
    ({"guided_regex": "("}, "guided_regex", "invalid_value", "guided_regex cannot be used"),
    (
        {"structured_outputs": {"choice": "a"}},
        "structured_outputs.choice",
        "invalid_value",
        "is not a list",
    ),
    (
        by_schema({"type": "array", "uniqueItems": True}),
        SCHEMA,
        "invalid_value",
        "leave out uniqueItems",
    ),
    (
        {"chat_template_kwargs": {"colour": 1}},
        "chat_template_kwargs.colour",
        "invalid_value",
        "chat_template_kwargs.colour is not a variable",
    ),
    (
        {"chat_template_kwargs": {"a": 1}},
        "chat_template_kwargs.a",
        "invalid_value",
        "chat_template_kwargs.a is not a variable of the model's chat template",
    ),
    ({"stream": 1}, "stream", "invalid_type", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "", "stream set to true"),
    ({"t_min": 3}, "t_max", "invalid_value", "below t_min 3.0"),
    ({"entropy_bound": 0}, "entropy_bound", "invalid_value", "above 0"),
    ({"max_denoising_steps": 10**6}, "max_denoising_steps", "invalid_value", "10000"),
    ({"messages": []}, "messages", "invalid_value", "at least 1"),
    ({"messages": "hello"}, "messages", "invalid_type", "array"),
    (
        {"messages": [{"content": "a"}]},
        "messages[0].role",
        "invalid_value",
        "roles",
    ),
    (
        {"messages": [{"role": "function", "content": "a"}]},
        "messages[0].role",
        "invalid_value",
        "'function'",
    ),
    (
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages[0].tool_call_id",
        "invalid_type",
        "names the call",
    ),
    ({"messages": user(None)}, "messages[0].content", "invalid_type", "list of parts"),
    ({"messages": user([IMAGE])}, "messages", "invalid_value", "chat template wrote 0"),
    (
        {"messages": user([{"type": "text"}])},
        "messages[0].content[0]",
        "invalid_value",
        "text or image part",
    ),
    ({"messages": user("x" * 9000)}, "messages", "context_length_exceeded", "9016 tokens"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"), CASES, ids=lambda each: str(each)[:40]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_names_its_parameter(
    openai: OpenAI, fields: dict[str, Any], param: str, code: str, says: str, stream: bool
):
    body = {"model": "canvasrt", "messages": QUESTION, "stream": stream, **fields}
    if "stream_options" in fields and "stream" not in fields:
        body["stream"] = False
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.post("/chat/completions", body=body, cast_to=object)
    error = caught.value
    assert error.status_code == 400
    assert error.type == "invalid_request_error"
    assert error.param == param
    assert (error.code or "") == code
    assert says in error.body["message"]  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [112]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": "x" * 9000}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "score_blocks": True}, "score_blocks"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "guided_regex": "a"}, "echo"),
        ({"prompt": "a", "min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"prompt": "a", "min_tokens": 3, "guided_regex": "a"}, "min_tokens"),
        ({"prompt": "a", "diffusion_pinned": [0]}, "diffusion_pinned"),
        ({"prompt": "a", "diffusion_seed_canvas": [112]}, "diffusion_seed_canvas"),
        ({"prompt": "a", "diffusion_canvas_length": 3}, "diffusion_canvas_length"),
        ({"prompt": "a", "vllm_xargs": {"diffusion_max_steps": 0}}, "diffusion_max_steps"),
        (
            {"prompt": "a", "vllm_xargs": {"diffusion_read_only": True}},
            "diffusion_read_only",
        ),
        ({"prompt": "a", "diffusion_constrained": True}, "diffusion_constrained"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_completion_tokens": 3}, "max_completion_tokens"),
        ({}, "prompt"),
    ],
)
def test_a_bad_completion_names_its_parameter(openai: OpenAI, fields: Any, param: str):
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.post("/completions", body={"model": "canvasrt", **fields}, cast_to=object)
    assert caught.value.param == param


def test_an_unknown_model_is_not_found(openai: OpenAI):
    with pytest.raises(sdk.NotFoundError) as caught:
        openai.chat.completions.create(model="gpt", messages=QUESTION)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(sdk.NotFoundError):
        openai.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/../etc", 404),
        ("GET", "/index.html", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/canvasrt", 405),
    ],
)
def test_unknown_routes_have_the_same_shape(front: FrontEnd, method: str, path: str, status: int):
    reply, body = call(front, method, path)
    assert reply.status == status
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert reply.getheader("x-request-id", "").startswith("req_")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"a"', b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"[" * 5000],
)
def test_what_is_no_json_object_is_refused(front: FrontEnd, body: bytes):
    reply, said = call(front, "POST", "/v1/chat/completions", body)
    assert reply.status == 400
    assert json.loads(said)["error"]["type"] == "invalid_request_error"


def test_numbers_that_json_has_not_are_refused(front: FrontEnd):
    body = b'{"model": "canvasrt", "messages": [{"role": "user", "content": "a"}], "t_min": NaN}'
    reply, said = call(front, "POST", "/v1/chat/completions", body)
    assert reply.status == 400
    assert json.loads(said)["error"]["param"] == "t_min"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(front: FrontEnd, chunked: bool):
    body: Any = b"x" * (17 * 2**20)
    if chunked:
        body = iter([b"x" * 2**20] * 17)
    reply, said = call(front, "POST", "/v1/completions", body, encode_chunked=chunked)
    assert reply.status == 413
    assert json.loads(said)["error"]["code"] == "request_too_large"


def call(
    front: FrontEnd, method: str, path: str, body: Any = None, **options: Any
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
    with contextlib.suppress(OSError):  # the server answers before the whole body has arrived
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        connection.request(method, path, body, headers, **options)
    try:
        reply = connection.getresponse()
        return reply, reply.read()
    finally:
        connection.close()


def test_keys_are_asked_for_where_there_are_some(server: Server):
    options = FrontOptions(port=0, keys=("first", "zweiter Schlüssel"))
    with FrontEnd.over(server, options) as front:
        for key, right in (
            ("first", True),
            ("zweiter Schlüssel", True),
            ("firs", False),
            ("", False),
        ):
            headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
            for path in ("/v1/models", "/v1/models/canvasrt"):
                reply, body = call(front, "GET", path, headers=headers)
                assert reply.status == (200 if right else 401)
            if not right:
                assert json.loads(body)["error"]["code"] == ("invalid_api_key" if key else None)
                assert reply.getheader("www-authenticate") == "Bearer"
        with OpenAI(base_url=front.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(sdk.AuthenticationError):
                client.chat.completions.create(model="canvasrt", messages=QUESTION)  # type: ignore[arg-type]
            right_one = client.with_options(api_key="first")
            assert right_one.chat.completions.create(
                model="canvasrt",
                messages=QUESTION,  # type: ignore[arg-type]
                max_tokens=3,
            )
        reply, _ = call(front, "GET", "/v1/health/ready")
        assert reply.status == 200
