"""Requests that the front end refuses without asking a model, in every API, and the field that each error names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.helpers.agents import CLOCK, WEATHER
from tests.helpers.alone import lone_front

PNG = "data:image/png;base64,AA=="
REMOTE = "https://example.com/a.png"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def front() -> Iterator[TestClient]:
    with lone_front() as client:
        yield client


@pytest.fixture
def ask(front: TestClient) -> Any:
    """Return a function: `ask(path, **fields)` returns the error, or None if the front end accepts the request."""

    def call(path: str, **fields: Any) -> Any:
        reply = front.post(path, json={"model": "canvasrt", **fields})
        assert reply.status_code in (400, 503), reply.text
        return reply.json()["error"] if reply.status_code == 400 else None

    return call


def image(url: Any = PNG, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


def call(name: str, arguments: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    return [{"id": "1", "type": "function", "function": function}]


PART = "messages[0].content[0]"
NAMED = {"type": "function", "function": {"name": "weather"}}
BAD_NAME = {"type": "function", "function": {"name": "a b"}}
# Error code → a chat's fields, the parameter that the error names, and a text in its message.
CHATS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "invalid_type": [
        ({"temperature": True}, "temperature", "valid number"),
        ({"logit_bias": {"3": "x"}}, "logit_bias.3", "valid number"),
        ({"canvas": 3}, "canvas", "should be an object"),
        ({"logprobs": 2}, "logprobs", "valid boolean"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"stop": ["a", 3]}, "stop[1]", "string"),
        ({"stream": 1}, "stream", "boolean"),
        ({"messages": "hello"}, "messages", "array"),
        (said("tool", "a"), "messages[0].tool_call_id", "the id of the call"),
        (said("user", None), "messages[0].content", "list of parts"),
        (user(), "messages[0].content", "list of parts"),
        (user(image(3)), f"{PART}.image_url.url", "must be a string"),
        (
            said("assistant", "", tool_calls=call("f", "1")),
            "messages[0].tool_calls[0].function.arguments",
            "a JSON object",
        ),
    ],
    "invalid_value": [
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"canvas_length": -2}, "canvas_length", "greater than or equal to -1"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "equal to 20"),
        ({"max_denoising_steps": 10**6}, "max_denoising_steps", "10000"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "disagree"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "128"),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
        ({"seed": 2**64}, "seed", "18446744073709551615"),
        ({"seed": 2**64 - 1, "n": 2}, "seed", "below"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'none', 'auto'"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice", "not one of tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "two functions named 'clock'"),
        ({"tools": [BAD_NAME]}, "tools[0].function.name", "pattern"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'none', 'minimal'"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "give one of"),
        (
            {"guided_json": {"type": "object"}, "guided_regex": "a"},
            "guided_json",
            "one of several formats",
        ),
        *(
            ({"structured_outputs": {"choice": each}}, "structured_outputs.choice", "not a list")
            for each in ("a", [], [1], ["a", None])
        ),
        ({"guided_choice": ["a", ""], "guided_regex": "a"}, "guided_regex", "several formats"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "roles"),
        (said("function", "a"), "messages[0].role", "'function'"),
        (user({"type": "text"}), PART, "text or image part"),
        (user(image("data:image/png;base64,&&")), f"{PART}.image_url.url", "data URL in base64"),
        (user(image(detail="huge")), f"{PART}.image_url.detail", "auto, low, high"),
        (user(image()) | {"image_tokens": 100}, "image_tokens", "70, 140 or 280"),
    ],
    "unsupported_parameter": [
        ({"presence_penalty": 0.5}, "presence_penalty", "or send 0"),
        ({"frequency_penalty": -1}, "frequency_penalty", "or send 0"),
        ({"bad_words": ["x"]}, "bad_words", "Leave it out"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "not supported",
        ),
        ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos", "not supported with a format"),
        (user({"type": "input_audio"}), PART, "text and images"),
        (user(image(REMOTE)), f"{PART}.image_url.url", "--allow-remote-images"),
        (said("system", [image()]), "messages[0].content", "only a user's message may have one"),
        (said("assistant", [image()]), "messages[0].content", "only a user's message may have"),
        (said("assistant", "a", refusal="no"), "messages[0].refusal", "not supported"),
    ],
    "missing_required_parameter": [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "function"),
    ],
    "": [({"stream_options": {"include_usage": True}}, "stream_options", "stream set to true")],
}


@pytest.mark.parametrize(
    ("code", "fields", "param", "says"),
    [(code, *row) for code, rows in CHATS.items() for row in rows],
    ids=lambda each: str(each)[:40],
)
def test_a_chat(ask: Any, code: str, fields: dict[str, Any], param: str, says: str) -> None:
    error = ask("/v1/chat/completions", **{"messages": HELLO, **fields})
    assert (error["param"], error["code"] or "") == (param, code)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_images_and_empty_answers_are_no_mistakes(ask: Any) -> None:
    for url in (PNG, "AA=="):
        assert ask("/v1/chat/completions", **user(image(url))) is None
    for content in (None, []):  # Pydantic AI sends null if an answer is only a thought
        chat = [
            {"role": "assistant", "content": content, "reasoning_content": "b"},
            {"role": "assistant", "content": content, "tool_calls": call("f", "{}")},
            {"role": "tool", "content": content, "tool_call_id": "1"},
        ]
        assert ask("/v1/chat/completions", messages=[*HELLO, *chat]) is None


def block(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}
TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}
FAR_IMAGE = {"type": "input_image", "image_url": REMOTE}
NOUL = {"type": "noul", "instructions": "?"}
LONG = {"type": "choice", "instructions": "?", "criteria": {str(n): None for n in range(27)}}
READ = {"diffusion_read_only": True, "diffusion_seed_canvas": [5]}
TWICE = {"max_completion_tokens": 3}
FORM = {"format": {"type": "json_schema", "schema": {"type": "x"}}}
# Path → fields, the parameter that the error names if the API's errors have one, and a text in its message.
OTHERS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "/v1/completions": [
        *(({"prompt": each}, "prompt", "prompt") for each in ([], [1.5], ["a", 3], [2**40])),
        ({}, "prompt", "Missing"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "exceed 128"),
        ({"prompt": "a", "diffusion_pinned": [0]}, "diffusion_pinned", "position 0"),
        ({"prompt": "a", "best_of": 3}, "best_of", "all n answers"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "equal to 20"),
        ({"prompt": "a", **TWICE}, "max_completion_tokens", "not supported"),
        (
            {"prompt": "a", **READ, "guided_regex": "a"},
            "diffusion_read_only",
            "diffusion_read_only is not supported with a format",
        ),
    ],
    "/v1/responses": [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"background": True}, "background", "nothing is stored"),
        ({"tool_choice": ALLOWED}, "tool_choice", "not one of tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'auto'"),
        ({"text": {"format": {"type": "nothing"}}}, "text.format.type", "text.format.type is"),
        ({"input": [{"type": "item_reference"}]}, "input[0]", "set store to false"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role", "input[0].role"),
        ({"input": block({"type": "input_file"})["messages"]}, "input[0].content[0]", "of type"),
        (
            {"input": block(FAR_IMAGE)["messages"]},
            "input[0].content[0].image_url.url",
            "input[0].content[0].image_url.url is remote",
        ),
        ({"input": []}, "input", "at least 1"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'none'"),
    ],
    "/v1/messages": [
        ({"n": 2}, "", "n is not supported"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "He"}]}, "", "cannot continue"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "", "messages.0.role"),
        (block({"type": "document"}), "", "messages.0.content.0: a block of type 'document'"),
        (block(PICTURE), "", "messages.source"),
        ({"tool_choice": {"type": "sometimes"}, "tools": [TOOL]}, "", "tool_choice"),
        ({"tools": [{**TOOL, "name": "x" * 129}]}, "", "tools[0].name"),
    ],
    "/v1/messages/count_tokens": [
        ({"top_p": 2}, "", "top_p"),
        ({"min_p": -0.5}, "", "min_p"),
        ({"t_min": 3, "t_max": 1}, "", "t_max"),
    ],
    "/v1/decisions": [
        ({"input": []}, "input", "a list of messages"),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role", "give one of"),
        (
            {"input": block(FAR_IMAGE)["messages"]},
            "input[0].content[0].image_url.url",
            "input[0].content[0].image_url.url is remote",
        ),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
    ],
    "/v1/systemone": [
        ({"questions": {"mine": LONG}}, "questions.mine.criteria", "at most 26"),
        ({"questions": {"mine": {"type": "predicate"}}}, "questions.mine.type", "noul, choice"),
        ({"state": " "}, "state", "empty"),
    ],
    "/tokenize": [
        ({"prompt": None}, "prompt", "either prompt or messages"),
        ({"prompt": "a", "messages": HELLO}, "prompt", "either prompt or messages"),
        ({"messages": []}, "messages", "at least 1"),
        ({"continue_final_message": True}, "continue_final_message", "not supported"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", "template writes"),
    ],
    "/detokenize": [
        ({"tokens": [-1]}, "tokens[0]", "equal to 0"),
        ({"tokens": ["a"]}, "tokens[0]", "valid integer"),
        ({}, "tokens", "Missing"),
    ],
    "/api/chat": [
        ({"options": {"repeat_penalty": 1.5}}, "", "options.repeat_penalty is not supported"),
        ({"options": {"mirostat": 1}}, "", "options.mirostat is not supported"),
        *(
            ({"options": {name: 0.5}}, "", f"options.{name} is not supported")
            for name in ("presence_penalty", "frequency_penalty")
        ),
        ({"options": {"temperature": "hot"}}, "", "options.temperature"),
        ({"options": {"num_predict": "a"}}, "", "options.num_predict"),
        ({"think": "very"}, "", "think"),
    ],
    "/api/generate": [
        ({"images": [REMOTE]}, "", "--allow-remote-images"),
        ({"images": ["aGk="], "raw": True}, "", "images are not supported with raw"),
    ],
}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 64},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "?"}]},
    "/v1/systemone": {"state": "a", "questions": {"mine": NOUL}},
    "/tokenize": {},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "a"},
}


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [(path, *row) for path, rows in OTHERS.items() for row in rows],
    ids=lambda each: str(each)[:40],
)
def test_another_api(ask: Any, path: str, fields: dict[str, Any], param: str, says: str) -> None:
    error = ask(path, **{**NEEDED.get(path, {}), **fields})
    assert says in (error if isinstance(error, str) else error["message"])
    assert (error.get("param") or "" if isinstance(error, dict) else "") == param
    if NEEDED.get(path):
        assert ask(path, **NEEDED[path]) is None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"a"', b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"[" * 5000],
)
def test_what_is_no_json_object(front: TestClient, body: bytes) -> None:
    reply = front.post("/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_numbers_that_json_has_not(front: TestClient) -> None:
    body = b'{"model": "canvasrt", "messages": [{"role": "user", "content": "a"}], "t_min": NaN}'
    assert front.post("/v1/chat/completions", content=body).json()["error"]["param"] == "t_min"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/../etc", 404, "unknown_url"),
        ("GET", "/v1/models/gpt", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_supported"),
        ("DELETE", "/v1/models/canvasrt", 405, "method_not_supported"),
    ],
)
def test_unknown_routes(front: TestClient, method: str, path: str, status: int, code: str) -> None:
    reply = front.request(method, path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, code)
    assert reply.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", {"param": "model", "code": "model_not_found"}),
        ("/v1/messages", {"type": "not_found_error"}),
        ("/api/chat", "model 'gpt' not found"),
        ("/api/show", "model 'gpt' not found"),
    ],
)
def test_an_unknown_model(front: TestClient, path: str, said: Any) -> None:
    reply = front.post(path, json={"model": "gpt", "messages": HELLO, "max_tokens": 64})
    error = reply.json()["error"]
    assert reply.status_code == 404
    assert error == said if isinstance(said, str) else said.items() <= error.items()
