"""The client's errors for servers that cannot answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import canvasrt.containers.client.triton as client_module
from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.server import Server
from canvasrt.errors import CanvasError, UsageError
from tests.helpers.serving import ENDLESS, needs_triton

pytest.importorskip("tritonclient", reason="tritonclient is not installed")


@pytest.fixture
def silent() -> Iterator[str]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_never_answers(silent: str, protocol: client_module.Protocol):
    with Client(silent, protocol, timeout=1) as client, pytest.raises(CanvasError) as refused:
        client.infer({"prompt": "x"})
    assert "--timeout" in refused.value.hint or "--url" in refused.value.hint


@needs_triton
@pytest.mark.parametrize(
    ("protocol", "streams"), [("http", False), ("grpc", False), ("grpc", True)]
)
def test_an_answer_that_takes_too_long(
    server: Server, protocol: client_module.Protocol, streams: bool
):
    url = f"127.0.0.1:{getattr(server.ports, protocol)}"
    inputs = {"prompt": "x", **ENDLESS, "max_denoising_steps": 2000, "max_new_tokens": 4}
    late = pytest.raises(CanvasError, match=r"did not answer within 0\.5 s")
    with Client(url, protocol, timeout=0.5) as client, late:
        list(client.stream(inputs)) if streams else client.infer(inputs)


@needs_triton
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_without_the_model(
    server: Server, monkeypatch: pytest.MonkeyPatch, protocol: client_module.Protocol
):
    monkeypatch.setattr(client_module, "ANSWER_MODEL", "absent")
    url = f"127.0.0.1:{getattr(server.ports, protocol)}"
    missing = pytest.raises(CanvasError, match="has no model 'absent'")
    with Client(url, protocol) as client, missing:
        client.infer({})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (None, "127.0.0.1:8080"),
        ("http://host:1234/", "host:1234"),
        ("host:1234", "host:1234"),
        ("http://host", "host:8080"),
    ],
)
def test_the_address_is_host_and_port(url: str | None, address: str):
    with Client(url) as client:
        assert client.url == address


def test_triton_streams_over_grpc_alone():
    with Client("127.0.0.1:1", "http") as client:
        with pytest.raises(UsageError, match="Triton does not stream over http"):
            next(client.stream({"prompt": "x"}))


@needs_triton
def test_a_kept_stream_takes_request_after_request(server: Server):
    """A request may follow one that the caller left early, and one that failed."""
    asked = {"prompt": "12+34=", "seed": 7, "max_new_tokens": 40, "max_denoising_steps": 6}
    url = f"127.0.0.1:{server.ports.grpc}"

    def answers(client: Client) -> list[tuple[str, list[int]]]:
        return [(event.event, event.token_ids) for event in client.stream(asked)]

    with Client(url, "grpc") as other, Client(url, "grpc", keep_stream=True) as client:
        expected = answers(other)
        assert [answers(client) for _ in range(3)] == [expected] * 3
        kept = client._idle
        assert kept is not None
        assert answers(client) == expected
        assert client._idle is kept
        for event in client.stream({**asked, "max_new_tokens": 400}):
            assert event.event == "block"
            break
        assert answers(client) == expected
        with pytest.raises(CanvasError, match="seed"):
            list(client.stream({**asked, "max_denoising_steps": 0, "seed": -1}))
        assert answers(client) == expected
        assert other._idle is None
