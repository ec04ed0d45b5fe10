"""Chats with very many parts, and long bodies, which must not block the event loop."""

from __future__ import annotations

import importlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from canvasrt.containers.openai.body import MAX_PARTS
from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.alone import lone_front
from tests.helpers.serving_process import call

pytestmark = pytest.mark.acceptance

LONG = "x" * 100_000
TEXT = {"type": "text", "text": "a"}
CHAT: dict[str, Any] = {"model": "canvasrt", "messages": [{"role": "user", "content": LONG}]}
PART = {"type": "input_text", "text": "a"}


def tool_call(arguments: str = "{}") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


# A path, a long body for it, and the functions that must not run on the event loop.
ROUTES = {
    "chat": ("/v1/chat/completions", CHAT, ["generation.read_messages", "app.read_body"]),
    "text": ("/v1/completions", {"model": "canvasrt", "prompt": LONG}, ["chat._prompt"]),
    "responses": (
        "/v1/responses",
        {"model": "canvasrt", "input": LONG},
        ["responses._messages", "generation.read_messages"],
    ),
    "ollama chat": ("/api/chat", CHAT, ["app.read_body", "ollama._messages"]),
    "ollama": (
        "/api/generate",
        {"model": "canvasrt", "prompt": LONG},
        ["ollama._messages", "generation.read_messages"],
    ),
    "decisions": (
        "/v1/decisions",
        {"model": "canvasrt", "input": LONG, "questions": []},
        ["decisions._messages", "generation.read_messages"],
    ),
    "systemone": (
        "/v1/systemone",
        {"model": "canvasrt", "state": LONG, "questions": {"a": {"type": "noul"}}},
        ["systemone._question"],
    ),
    "infill": ("/v1/infill", {"model": "canvasrt", "text": LONG}, ["app.answer_inputs"]),
    "tokenize": ("/tokenize", CHAT, ["generation.read_messages", "app.read_body"]),
}


@pytest.mark.parametrize("name", ROUTES)
def test_long_bodies_are_processed_beside_the_event_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    path, body, functions = ROUTES[name]
    ran: dict[str, set[str]] = {}
    for each in functions:
        module, _, function = each.partition(".")
        found = importlib.import_module(f"canvasrt.containers.openai.{module}")
        watch(monkeypatch, found, function, ran.setdefault(each, set()))
    with lone_front() as client:
        assert client.post(path, json=body).status_code == 503  # no Triton
    for each in functions:
        assert ran[each], each
        assert all(thread.startswith("canvasrt-") for thread in ran[each]), each


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, ran: set[str]) -> None:
    """Record the names of the threads on which a function runs."""
    original = getattr(module, name)

    def noted(*given: Any, **named: Any) -> Any:
        ran.add(threading.current_thread().name)
        return original(*given, **named)

    monkeypatch.setattr(module, name, noted)


MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [TEXT] * 5000}] * 2},
    ),
    "calls": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [tool_call()] * 9000}]},
    ),
    "tokenized": ("/tokenize", {"messages": [{"role": "user", "content": [TEXT] * 9000}]}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": [PART] * 9000}]}),
    "decisions": (
        "/v1/decisions",
        {"input": [{"role": "user", "content": [PART] * 9000}], "questions": []},
    ),
    "messages": (
        "/v1/decisions",
        {"input": [{"role": "user", "content": "a"}] * 9000, "questions": []},
    ),
    "ollama's calls": (
        "/api/chat",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 9000,
                }
            ]
        },
    ),
    "ollama's images": ("/api/generate", {"prompt": "a", "images": ["AAAA"] * 9000}),
}


@pytest.mark.parametrize("name", MANY)
def test_a_chat_may_have_so_many_parts(front: FrontEnd, name: str):
    path, body = MANY[name]
    url = f"http://127.0.0.1:{front.port}{path}"
    reply = httpx.post(url, json={"model": "canvasrt", **body}, timeout=60)
    assert reply.status_code == 400
    assert str(MAX_PARTS) in reply.text


def test_others_are_answered_beside_15_mb_of_tool_calls(front: FrontEnd):
    arguments = json.dumps({"text": "x" * 1740})
    messages = [{"role": "assistant", "tool_calls": [tool_call(arguments)] * (MAX_PARTS - 1)}]
    body = json.dumps({"model": "canvasrt", "messages": messages})
    assert 14e6 < len(body) < 16 * 2**20
    url = f"http://127.0.0.1:{front.port}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(httpx.post, url, content=body, headers=headers, timeout=60)
        checks = 0
        while not sent.done():
            assert call(f"127.0.0.1:{front.port}", "/v1/health/live")[0] == 200
            checks += 1
        assert sent.result().status_code == 503  # no Triton
    assert checks > 3  # on the event loop, the first would wait
