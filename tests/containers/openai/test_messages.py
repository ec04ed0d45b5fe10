"""Conversations that the front end itself refuses, in every API; no model is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.alone import lone_front

PNG = "data:image/png;base64,AA=="


@pytest.fixture(scope="module")
def ask() -> Any:
    """`ask(path, **fields)` returns the error; None if only the missing model keeps the request from being answered."""
    with lone_front() as client:

        def call(path: str, **fields: Any) -> Any:
            reply = client.post(path, json={"model": "canvasrt", **fields})
            assert reply.status_code in (400, 503), reply.text
            return reply.json()["error"] if reply.status_code == 400 else None

        yield call


def image(url: Any = PNG, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


WHERE = "messages[0].content[0]"
CHATS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "a data URL": ({"messages": user(image(), {"type": "text", "text": "?"})}, None, ""),
    "bare base64": ({"messages": user(image("AA=="))}, None, ""),
    "remote": (
        {"messages": user(image("https://example.com/a.png"))},
        f"{WHERE}.image_url.url",
        "--allow-remote-images",
    ),
    "not base64": (
        {"messages": user(image("data:image/png;base64,&&"))},
        f"{WHERE}.image_url.url",
        "data URL in base64",
    ),
    "no string": ({"messages": user(image(3))}, f"{WHERE}.image_url.url", "must be a string"),
    "detail": (
        {"messages": user(image(detail="huge"))},
        f"{WHERE}.image_url.detail",
        "auto, low, high",
    ),
    "budget": (
        {"messages": user(image()), "image_tokens": 100},
        "image_tokens",
        "70, 140 or 280",
    ),
    "audio": ({"messages": user({"type": "input_audio"})}, WHERE, "text and images"),
    "a system's image": (
        {"messages": [{"role": "system", "content": [image()]}]},
        "messages[0].content",
        "only a user's message may have one",
    ),
    "an assistant's image": (
        {"messages": [{"role": "assistant", "content": [image()]}]},
        "messages[0].content",
        "only a user's message may have one",
    ),
    "a field": (
        {"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]},
        "messages[0].refusal",
        "not supported",
    ),
}


@pytest.mark.parametrize(("fields", "param", "says"), CHATS.values(), ids=CHATS)
def test_a_chat(ask: Any, fields: dict[str, Any], param: str | None, says: str) -> None:
    error = ask("/v1/chat/completions", **fields)
    assert (error and error["param"]) == param
    assert says in json.dumps(error)


@pytest.mark.parametrize("content", [None, []])
def test_an_answer_and_a_result_may_be_empty(ask: Any, content: Any) -> None:
    # Pydantic AI sends null for an answer that is only a thought.
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        *user({"type": "text", "text": "a"}),
        {"role": "assistant", "content": content, "reasoning_content": "b"},
        *user({"type": "text", "text": "c"}),
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": content, "tool_call_id": "c"},
    ]
    assert ask("/v1/chat/completions", messages=chat) is None
    error = ask("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert "must be a string or a list of parts" in error["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/decisions"])
def test_input_is_called_by_its_name(ask: Any, path: str) -> None:
    part = {"type": "input_image", "image_url": "https://example.com/a.png"}
    more = {"questions": [{"type": "predicate", "instructions": "?"}]} if "dec" in path else {}
    error = ask(path, input=user(part), **more)
    assert error["param"] == "input[0].content[0].image_url.url"
    assert "input[0].content[0]" in error["message"]
    assert "--allow-remote-images" in error["message"]
    assert ask(path, input=user({**part, "image_url": PNG}), **more) is None


def test_errors_of_ollama_are_words(ask: Any) -> None:
    for fields, says in (
        ({"images": ["https://example.com/a.png"]}, "--allow-remote-images"),
        ({"options": {"mirostat": 1}}, "options.mirostat is not supported"),
        ({"options": {"temperature": "hot"}}, "temperature"),
    ):
        assert says in ask("/api/generate", prompt="a", **fields)
