"""If the model exceeds `--request-timeout`, the front end answers with an error and ends the request."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from canvasrt.bundle import Bundle
from canvasrt.containers.client.triton import Client
from canvasrt.containers.openai import middleware
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.middleware import Middleware
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.tensors import STREAM_MODEL, outputs_of
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import CanvasError
from tests.helpers.alone import Alone
from tests.helpers.serving import ENDLESS, eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, JSON, serving

CHAT: dict[str, Any] = {"model": "canvasrt", "messages": [{"role": "user", "content": "a"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "canvasrt", "prompt": "a", "n": 2},
    "/v1/responses": {"model": "canvasrt", "input": "a"},
    "/api/chat": {**CHAT, "stream": False},
    "/v1/decisions": {"model": "canvasrt", "input": "a", "questions": [{}]},
    "/tokenize": {"model": "canvasrt", "prompt": "a"},
}


class Hanging(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A fake Triton that accepts requests and never ends them. If `begins` is set, it begins an answer."""

    begins = False

    def __init__(self) -> None:
        self.running = 0
        self.ended = threading.Event()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        next(requests)
        self.running += 1
        done = threading.Event()
        context.add_callback(done.set)
        if self.begins:
            yield service_pb2.ModelStreamInferResponse(infer_response=first_event())
        while not done.wait(0.05) and not self.ended.is_set():
            pass
        self.running -= 1


def first_event() -> Any:
    """Return the first piece of an answer."""
    response = service_pb2.ModelInferResponse(model_name=STREAM_MODEL)
    values = {"event": "block", "text": "abc"}
    for tensor in outputs_of(STREAM_MODEL):
        blank: Any = [0] if tensor.shape == (-1,) else "" if tensor.datatype == "BYTES" else 0
        array = tensor.encode(values.get(tensor.name, blank))
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        response.raw_output_contents.append(tensor.to_wire(array))
    return response


@pytest.fixture
def hanging() -> Iterator[tuple[Hanging, str]]:
    """A fake Triton that hangs, and its address."""
    model = Hanging()
    server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(model, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield model, f"127.0.0.1:{port}"
    model.ended.set()
    server.stop(0).wait()


@pytest.mark.parametrize("begins", [False, True])
def test_a_model_that_does_not_answer_or_stream_on_is_left(
    alone: Alone, hanging: tuple[Hanging, str], begins: bool
):
    """Sends every kind of request, all at the same time."""
    model, triton = hanging
    model.begins = begins
    seconds = 5 if begins else 1  # which the first piece may take on a busy machine
    front = alone(triton=triton, request_timeout=seconds)
    streams = ("/v1/chat/completions", "/v1/responses", "/api/chat")
    asked = [(path, {**BODIES[path], "stream": True}) for path in streams]
    asked += [] if begins else [*BODIES.items()]

    def ask(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{front.port}{path}", json=body, timeout=60)

    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda each: ask(*each), asked))
    for reply in replies:
        assert reply.status_code == (200 if begins else 504)
        assert ("abc" in reply.text) == begins
        assert f"longer than {seconds} s" in reply.text
    assert eventually(lambda: model.running == 0)


def messages_of(app: Any) -> list[Any]:
    """Return what an application sends if the time limit for beginning is 0.2 s, with no grace."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    wrapped = Middleware(app, ServerState(), FrontMetrics(), 100, timeout=0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(middleware, "_GRACE", 0.0)
        asyncio.run(wrapped(scope, receive, send))
    return sent


def test_time_is_over_before_a_model_is_asked():
    """A request may exceed the limit while its long body waits for other bodies."""
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    sent = messages_of(app)
    assert ended == ["cancelled"]
    assert sent[0]["status"] == 504
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"


def test_an_answer_that_has_begun_may_be_long():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.5)
        await send({"type": "http.response.body", "body": b"a"})

    sent = messages_of(app)
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]


def test_the_front_end_has_the_models_limit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    given = Settings(model=ModelOptions(request_timeout=7))
    assert Server(tmp_path).request_timeout is None
    assert Server(tmp_path, given).request_timeout == 7
    monkeypatch.setenv("CANVASRT_REQUEST_TIMEOUT", "9")
    assert Server(tmp_path).request_timeout == 9
    assert Server(tmp_path, given).request_timeout == 7


@needs_triton
def test_callers_are_told_when_the_drain_is_over(packaged: Bundle, tmp_path: Path):
    """If an answer has not begun, the caller gets an error status. A stream that has begun ends with an error: as an
    event of Triton, a server-sent event, or a line of Ollama."""
    with (
        serving(packaged.path, tmp_path, *ANY_PORTS, "--exit-timeout", "1") as running,
        Client(running.said["grpc"], "grpc", timeout=60) as client,
    ):
        direct = client.stream({"prompt": "x", "drafts": True, **ENDLESS})
        assert next(direct)
        chat = {"model": "canvasrt", "messages": [{"role": "user", "content": "1+2="}]}

        def sent(path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
            caller = http.client.HTTPConnection(running.host, timeout=60)
            caller.request("POST", path, json.dumps({**chat, **body}), JSON)
            return caller

        # Many blocks; the first ends soon.
        blocks = {**ENDLESS, "max_denoising_steps": 60, "seed": 1}
        begun = [
            sent("/v1/chat/completions", {**blocks, "max_tokens": 4000, "stream": True}),
            sent("/api/chat", {"options": {**blocks, "num_predict": 4000}, "stream": True}),
        ]
        replies = [caller.getresponse() for caller in begun]
        assert all(reply.status == 200 and reply.readline() for reply in replies)
        waiting = [
            sent("/v1/chat/completions", {**ENDLESS, "stream": stream}) for stream in (False, True)
        ]
        counts = b"canvasrt_requests_in_flight 5"
        assert eventually(lambda: counts in httpx.get(running.said["metrics"]).content)
        errors = running.stop(signal.SIGTERM)
        assert "error: requests were still running after 1 s and were aborted\nhint: " in errors
        assert running.process.returncode == 1
        assert not running.stale()
        assert not running.scratch()
        with pytest.raises(CanvasError):
            list(direct)
        for caller in waiting:
            reply = caller.getresponse()
            assert reply.status == 503
            assert "error" in json.loads(reply.read())
        for reply in replies:
            *_, last = reply.read().strip().split(b"\n")
            assert b'"error"' in last, last
