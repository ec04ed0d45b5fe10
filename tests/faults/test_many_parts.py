"""Chats of very many parts, and long bodies: the event loop turns beside them."""

from __future__ import annotations

import http.client
import importlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from canvasrt.containers.openai.app import make_app
from canvasrt.containers.openai.options import FrontOptions, FrontSettings
from canvasrt.containers.openai.part_limits import MAX_PARTS
from canvasrt.containers.openai.state import ServerState
from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.alone import Alone

LONG = "x" * 100_000
TEXT = {"type": "text", "text": "a"}
CHAT: dict[str, Any] = {"model": "canvasrt", "messages": [{"role": "user", "content": LONG}]}
PART = {"type": "input_text", "text": "a"}


def call(arguments: str = "{}") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


# A route, a long body for it, and the functions that must not run on the event loop.
ROUTES = {
    "chat": ("/v1/chat/completions", CHAT, ["inputs.read_messages", "app.read_body"]),
    "text": ("/v1/completions", {"model": "canvasrt", "prompt": LONG}, ["inputs._prompt"]),
    "responses": (
        "/v1/responses",
        {"model": "canvasrt", "input": LONG},
        ["responses._messages", "inputs.read_messages"],
    ),
    "ollama chat": ("/api/chat", CHAT, ["ollama._body", "ollama._messages"]),
    "ollama": (
        "/api/generate",
        {"model": "canvasrt", "prompt": LONG},
        ["ollama._messages", "inputs.read_messages"],
    ),
    "decisions": (
        "/v1/decisions",
        {"model": "canvasrt", "input": LONG, "questions": []},
        ["decisions._messages", "decisions.read_messages"],
    ),
    "systemone": (
        "/v1/systemone",
        {"model": "canvasrt", "state": LONG, "questions": {"a": {"type": "noul"}}},
        ["decisions._own_question"],
    ),
    "infill": ("/v1/infill", {"model": "canvasrt", "text": LONG}, ["decisions.default_prompt"]),
    "tokenize": ("/tokenize", CHAT, ["tokenize.read_messages", "app.parse_body"]),
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
    options = FrontOptions(hosts=("*",))
    settings = FrontSettings(0, "127.0.0.1:1", "http://127.0.0.1:1/metrics", options)
    with TestClient(make_app(settings, ServerState(phase="serving"))) as client:
        assert client.post(path, json=body).status_code == 503  # nothing is behind it
    for each in functions:
        assert ran[each], each
        assert all(thread.startswith("canvasrt-") for thread in ran[each]), each


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, ran: set[str]) -> None:
    """Note the names of the threads on which a function runs."""
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
        {"messages": [{"role": "assistant", "tool_calls": [call()] * 9000}]},
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
def test_a_chat_may_have_so_many_parts(alone: Alone, name: str):
    path, body = MANY[name]
    front = alone()
    url = f"http://127.0.0.1:{front.port}{path}"
    reply = httpx.post(url, json={"model": "canvasrt", **body}, timeout=30)
    assert reply.status_code == 400
    assert str(MAX_PARTS) in reply.text


def test_others_are_answered_beside_15_mb_of_tool_calls(alone: Alone):
    front = alone()
    arguments = json.dumps({"numbers": list(range(370))})
    messages = [{"role": "assistant", "tool_calls": [call(arguments)] * (MAX_PARTS - 1)}]
    body = json.dumps({"model": "canvasrt", "messages": messages})
    assert 14e6 < len(body) < 16 * 2**20
    url = f"http://127.0.0.1:{front.port}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(httpx.post, url, content=body, headers=headers, timeout=60)
        waited = []
        while not sent.done():
            waited.append(seconds_of_a_health_check(front))
        assert sent.result().status_code == 503  # there is nothing behind the front end
    assert max(waited) < 2


def seconds_of_a_health_check(front: FrontEnd) -> float:
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
    connection.request("GET", "/v1/health/live")
    assert connection.getresponse().status == 200
    connection.close()
    return time.monotonic() - begin
