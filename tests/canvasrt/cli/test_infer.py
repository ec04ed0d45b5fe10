"""`canvasrt infer`: its output, and its errors if no server answers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import partial

import pytest

from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.runtime.tokenizer import Tokenizer
from tests.canvasrt.cli.conftest import fails
from tests.conftest import Command
from tests.helpers.serving import Local, needs_triton

pytestmark = needs_triton
SHORT = ("--seed", "7", "--max-new-tokens", "40", "--steps", "6")


@pytest.fixture
def infer(here: Command) -> Command:
    return partial(here, "infer")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_it_prints_the_answer(infer: Command, server: Server, local: Local, protocol: str):
    url = f"127.0.0.1:{getattr(server.ports, protocol)}"
    options = ("--url", url, "--protocol", protocol, *SHORT)
    expected = local("12+34=", seed=7, max_new_tokens=40, max_denoising_steps=6)
    shown = infer("12+34=", *options)
    data = json.loads(infer("12+34=", "--json", *options).stdout)
    assert data["token_ids"] == expected.token_ids
    assert shown.stdout == data["text"] + "\n"
    ids = ",".join(map(str, expected.prompt_token_ids))
    again = json.loads(infer("--prompt-ids", ids, "--json", *options).stdout)
    assert again == data


def test_text_is_printed_as_it_is(infer: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OpenAIClient, "ask", lambda self, inputs: {"text": "a:\n\tb"})
    assert infer("x", "--protocol", "openai").stdout == "a:\n\tb\n"


def test_it_takes_what_generate_takes(infer: Command, server: Server, tokenizer: Tokenizer):
    options = ("--url", f"127.0.0.1:{server.ports.http}", "--json", "--max-new-tokens", "8")
    raw = json.loads(infer("ab", "--raw", "--steps", "2", *options).stdout)
    assert raw["prompt_token_ids"] == tokenizer.encode("ab")
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]
    told = json.loads(infer("ab", "--system", "be brief", "--steps", "2", *options).stdout)
    assert told["prompt_token_ids"] == tokenizer.encode_chat(chat)


def test_it_streams(infer: Command, server: Server):
    options = ("--url", f"127.0.0.1:{server.ports.grpc}", "--protocol", "grpc", *SHORT)
    answer = infer("12+34=", *options).stdout
    assert infer("12+34=", "--stream", *options).stdout == answer
    lines = infer("12+34=", "--drafts", "--json", *options).stdout.splitlines()
    assert [json.loads(line)["event"] for line in lines].count("draft") == 12


@pytest.mark.parametrize(("protocol", "stream"), [("http", ()), ("grpc", ("--stream",))])
def test_without_a_server_it_says_so(
    infer: Command, protocol: str, stream: tuple[str, ...]
) -> None:
    done = infer("x", "--url", "127.0.0.1:9", "--protocol", protocol, *stream)
    assert "canvasrt serve" in fails(done, f"no server answers {protocol} at 127.0.0.1:9")


def test_a_refusal_of_the_server_is_shown_with_its_hint(infer: Command, server: Server):
    done = infer("x", "--url", f"127.0.0.1:{server.ports.http}", "--t-min", "3")
    hint = fails(done, "the server refused the request: t_max 0.8 is below t_min 3.0")
    assert "t_max >= t_min" in hint


@pytest.mark.parametrize(
    ("protocol", "at", "said"),
    [
        ("http", "api", "does not have Triton's http API"),
        ("grpc", "api", "does not have Triton's grpc API"),
        ("http", "grpc", "does not have Triton's http API"),
        ("grpc", "http", "does not have Triton's grpc API"),
        ("openai", "grpc", "does not speak HTTP"),
        ("openai", "http", 'HTTP 404: {"error":"Not Found"}'),
        ("openai", "https://api", "does not speak HTTPS"),
        ("openai", "metrics", "has no OpenAI API"),
        ("http", "metrics", "does not have Triton's http API"),
    ],
)
def test_a_port_of_another_protocol_is_named(
    infer: Command, server: Server, front: FrontEnd, protocol: str, at: str, said: str
) -> None:
    ports = {"api": front.port, **asdict(server.ports)}
    scheme, _, name = at.rpartition("://")
    url = f"{scheme or 'http'}://127.0.0.1:{ports[name]}"
    done = infer("x", "--url", url, "--protocol", protocol)
    assert "--url" in fails(done, f"{re.escape(said)}$")
