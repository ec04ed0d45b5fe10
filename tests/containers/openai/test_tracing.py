"""OpenTelemetry spans of requests and of their blocks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from canvasrt.containers.names import COLLECTOR
from canvasrt.containers.openai.app import make_app
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.options import FrontOptions, FrontSettings
from canvasrt.containers.openai.tracing import Blocks
from canvasrt.containers.processes import CALLER_SECRET
from canvasrt.containers.serve.checks import check_tracing
from canvasrt.errors import CanvasError
from tests.helpers.scripted import Script, Served
from tests.helpers.serving import needs_triton

PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"
CHAT = {"model": "canvasrt", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the spans of this process."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return made


@pytest.fixture
def front(acting_server: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: `front(on)` is a front end in this process, in front of the shared Triton."""
    grpc = f"127.0.0.1:{acting_server.server.ports.grpc}"
    settings = FrontSettings(0, grpc, "http://127.0.0.1:1", FrontOptions(hosts=("*",)))
    settings = replace(settings, caller_secret=CALLER_SECRET)

    def started(on: bool) -> TestClient:
        if on:
            monkeypatch.setenv(COLLECTOR, "http://127.0.0.1:1")
            monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")  # only the fixture's exporter
        return TestClient(make_app(settings, ServerState(phase="serving")))

    return started


@needs_triton
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_its_blocks_have_spans(
    exporter: InMemorySpanExporter, front: Any, acting: Script, stream: bool
) -> None:
    body = {**CHAT, **acting.choose("long"), "max_tokens": 1024, "n": 2, "stream": stream}
    with front(on=True) as client:
        reply = client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
        assert (reply.status_code, client.get("/v1/health/live").status_code) == (200, 200)
    *blocks, request = exporter.get_finished_spans()
    assert request.name == "POST /v1/chat/completions"
    assert (request.context.trace_id, request.parent.span_id) == (0xABC, 0xDEF)
    assert {block.parent.span_id for block in blocks} == {request.context.span_id}
    told = sorted(
        (each.attributes["canvasrt.answer"], each.attributes["canvasrt.block"]) for each in blocks
    )
    count = len(told) // 2
    assert count > 1
    assert told == [(answer, block) for answer in range(2) for block in range(count)]
    for answer in range(2):
        mine = [each for each in blocks if each.attributes["canvasrt.answer"] == answer]
        assert [each.start_time for each in mine[1:]] == [each.end_time for each in mine[:-1]]
    assert all(each.attributes["canvasrt.steps"] >= 1 for each in blocks)


def test_a_block_that_a_stop_string_cuts_has_one(exporter: InMemorySpanExporter) -> None:
    """If the stop string is in settled tokens, no event `block` follows."""
    with trace.get_tracer("test").start_as_current_span("request"):
        blocks = Blocks()
        for kind, steps in (("settled", []), ("block", [3]), ("settled", [3]), ("final", [3, 2])):
            blocks.see(0, SimpleNamespace(event=kind, steps=steps))  # type: ignore[arg-type]
    *found, _ = exporter.get_finished_spans()
    assert [each.attributes["canvasrt.steps"] for each in found] == [3, 2]


@needs_triton
def test_there_are_none_without_a_collector(
    exporter: InMemorySpanExporter, front: Any, acting: Script
) -> None:
    with front(on=False) as client:
        body = {**CHAT, **acting.choose("plain")}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert not exporter.get_finished_spans()


PROGRAM = """
from starlette.testclient import TestClient
from canvasrt.containers.names import COLLECTOR
from canvasrt.containers.openai.app import make_app
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.options import FrontOptions, FrontSettings
options = FrontOptions(hosts=("*",))
settings = FrontSettings(0, "127.0.0.1:1", "http://127.0.0.1:1", options)
with TestClient(make_app(settings, ServerState())) as client:
    client.get("/v1/models")
"""


def test_the_variable_names_the_collector() -> None:
    sent: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env={**os.environ, COLLECTOR: address}, check=True
        )
        server.shutdown()
    assert [path for path, _ in sent] == ["/v1/traces"]
    assert b"GET /v1/models" in sent[0][1]
    assert b"canvasrt" in sent[0][1]


def test_a_missing_extra_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    check_tracing()
    monkeypatch.setenv(COLLECTOR, "http://127.0.0.1:4318")
    with pytest.raises(CanvasError) as error:
        check_tracing()
    assert "canvasrt[otel]" in error.value.hint
