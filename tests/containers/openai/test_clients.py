"""Clients that know nothing of Python: curl, as the README calls the server."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.helpers.agents import WEATHER
from tests.helpers.scripted import Script, Served
from tests.helpers.serving import needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


@pytest.fixture
def curl(acting_server: Served):
    """`curl(path, body)` posts JSON to the front end and returns its output."""

    def post(path: str, body: dict[str, Any], *options: str) -> str:
        command = ["curl", "-sS", "--fail-with-body", "--max-time", "60", "-N", *options]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = subprocess.run(
            [*command, f"{acting_server.front.url}/{path}"],
            capture_output=True,
            text=True,
            check=True,
            env={"no_proxy": "*"},
        )
        return done.stdout

    return post


def test_a_chat(curl, acting: Script) -> None:
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": "Hello"}]}
    body |= acting.choose("plain")
    answer = json.loads(curl("chat/completions", body))
    assert answer["choices"][0]["message"]["content"] == "Hello there."
    lines = curl("chat/completions", {**body, "stream": True}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said == "Hello there."


def test_a_tool_call(curl, acting: Script) -> None:
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": "Hello"}]}
    answer = json.loads(
        curl("chat/completions", {**body, **acting.choose("calls"), "tools": [WEATHER]})
    )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 2}


def test_a_response(curl, acting: Script) -> None:
    body = {"model": "canvasrt", "input": "Hello", **acting.choose("thinks")}
    response = json.loads(curl("responses", body))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    events = curl("responses", {**body, "stream": True}).strip().split("\n\n")
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert (names[0], names[-1]) == ("response.created", "response.completed")
    for name, event in zip(names, events, strict=True):
        assert json.loads(event.split("\n")[1].removeprefix("data: "))["type"] == name


def test_triton_generates_over_http(acting_server: Served, acting: Script) -> None:
    url = f"http://127.0.0.1:{acting_server.server.ports.http}/v2/models/canvasrt/generate"
    body = {"prompt": "Hello", **acting.choose("plain")}
    done = subprocess.run(
        ["curl", "-sS", "--fail-with-body", "--max-time", "60", "-d", json.dumps(body), url],
        capture_output=True,
        text=True,
        check=True,
        env={"no_proxy": "*"},
    )
    assert json.loads(done.stdout)["text"] == "Hello there."
