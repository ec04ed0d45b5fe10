"""The life of the front end: callers that leave, loading, crashes, and draining."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve import frontend
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.errors import CanvasError
from tests.helpers.serving import ENDLESS, eventually, metric, needs_triton
from tests.helpers.serving_process import JSON, Reply, call, chat

pytestmark = needs_triton


@contextlib.contextmanager
def asking(front: FrontEnd, **fields: Any) -> Iterator[http.client.HTTPConnection]:
    """Send a request without reading the answer; provide its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    messages = [{"role": "user", "content": "12+34="}]
    body = {"model": "canvasrt", "messages": messages, **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
    with contextlib.closing(connection):
        yield connection


@contextlib.contextmanager
def starting(server: Server, **options: Any) -> Iterator[FrontEnd]:
    """A front end that has not yet been notified that the models are loaded."""
    front = FrontEnd.over(server, FrontOptions(port=0, **options))
    front.start()
    try:
        yield front
    finally:
        front.stop(grace=0)


def get(front: FrontEnd, path: str, port: int | None = None) -> Reply:
    return call(f"127.0.0.1:{port or front.port}", path)


def dead(front: FrontEnd) -> bool:
    return front._process is not None and front._process.poll() is not None


@pytest.mark.parametrize(
    ("n", "stream", "begun"), [(1, False, False), (3, True, False), (1, True, True)]
)
def test_hanging_up_ends_the_request_in_triton(
    front: FrontEnd, server: Server, n: int, stream: bool, begun: bool
):
    slow = ENDLESS | ({"max_denoising_steps": 300, "max_tokens": 4000} if begun else {})
    with asking(front, stream=stream, n=n, **slow) as connection:
        if begun:
            assert connection.getresponse().readline().startswith(b"data: {")
        assert eventually(lambda: metric(server, "canvasrt_requests_in_flight") == n)
    assert eventually(lambda: metric(server, "canvasrt_requests_in_flight") == 0)


def test_waiting_requests_and_canvases_are_told(front: FrontEnd, server: Server):
    with asking(front, n=6, **ENDLESS):
        assert eventually(lambda: metric(server, "canvasrt_requests_waiting") == 2)
        assert eventually(lambda: metric(server, "canvasrt_active_canvases") == 4)
    for name in ("requests_in_flight", "requests_waiting", "active_canvases"):
        assert eventually(lambda name=name: metric(server, f"canvasrt_{name}") == 0)


@pytest.mark.parametrize(("phase", "says"), [("building", "built"), ("loading", "loaded")])
def test_until_the_model_is_loaded_requests_are_put_off(server: Server, phase: Any, says: str):
    with starting(server) as front:
        front.notify(phase, "More.")
        assert eventually(lambda: get(front, "/v1/health/live").body["phase"] == phase)
        status, body, headers = chat(f"127.0.0.1:{front.port}")
        assert status == 503
        assert int(headers["retry-after"]) > 0
        assert (body["error"]["code"], body["error"]["type"]) == (phase, "service_unavailable")
        assert says in body["error"]["message"]
        assert body["error"]["message"].endswith("More.")
        assert get(front, "/v1/health/ready").status == 503


def test_without_triton_it_is_alive_and_not_ready():
    options = FrontOptions(port=0)
    with FrontEnd(options, "127.0.0.1:9", "http://127.0.0.1:9/metrics", None) as front:
        assert get(front, "/v1/health/live").status == 200
        assert get(front, "/v1/health/ready").status == 503
        assert chat(f"127.0.0.1:{front.port}").status == 503


def test_ready_is_said_when_callers_are_let_in(server: Server):
    with starting(server) as front:
        assert eventually(lambda: get(front, "/v1/health/live").body["phase"] == "starting")
        assert front.pid
        os.kill(front.pid, signal.SIGSTOP)  # like a very busy machine
        front.notify("serving")
        waiting = threading.Thread(target=front.wait_acknowledged)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        os.kill(front.pid, signal.SIGCONT)
        waiting.join(5)
        assert not waiting.is_alive()
        assert get(front, "/v1/models").status == 200


def test_a_front_end_that_has_accepted_no_request_is_not_waited_for(server: Server):
    with starting(server) as front:
        assert front.pid
        os.kill(front.pid, signal.SIGSTOP)  # like a very busy machine
        assert front.stop(grace=1)


def test_health_can_have_a_port_of_its_own(server: Server):
    with FrontEnd.over(server, FrontOptions(port=0, health_port=0)) as front:
        assert front.health_port
        ready = get(front, "/v1/health/ready", front.health_port)
        assert (ready.status, ready.body["status"]) == (200, "ready")
        assert get(front, "/v1/models", front.health_port).status == 404


def test_a_front_end_that_dies_is_replaced_and_no_caller_is_turned_away(server: Server):
    with FrontEnd.over(server, FrontOptions(port=0)) as front:
        first = front.pid
        assert first
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: dead(front))
        replies: list[Reply] = []
        waiting = threading.Thread(target=lambda: replies.append(get(front, "/v1/models")))
        waiting.start()
        front.check_alive()
        waiting.join(30)
        assert replies[0].status == 200
        assert front.pid != first


def test_a_front_end_that_hangs_before_its_first_beat_is_replaced(server: Server, monkeypatch: Any):
    monkeypatch.setattr(frontend, "_FIRST_BEAT", 0.0)
    with starting(server) as front:
        first = front.pid
        assert first
        os.kill(first, signal.SIGSTOP)
        front.check_alive()
        assert front.pid != first
        assert get(front, "/v1/health/live").status == 200


def test_a_front_end_that_cannot_live_is_given_up(server: Server, monkeypatch: Any):
    monkeypatch.setattr(frontend, "_BACKOFF", (0.0,))
    with (
        starting(server, log_level="NONSENSE") as front,
        pytest.raises(CanvasError, match="front end stopped with exit code 1, 6 times"),
    ):
        for _ in range(20):
            assert eventually(lambda: dead(front))
            front.check_alive()


def test_while_it_stops_new_requests_are_sent_away(server: Server):
    front = FrontEnd.over(server, FrontOptions(port=0))
    with front, asking(front, **ENDLESS):
        assert eventually(lambda: metric(server, "canvasrt_requests_in_flight") == 1)
        front.notify("stopping")
        assert eventually(lambda: get(front, "/v1/health/ready").status == 503)
        status, body, headers = chat(f"127.0.0.1:{front.port}")
        assert (status, body["error"]["code"]) == (503, "stopping")
        assert headers["connection"] == "close"
        assert not front.stop(grace=0.1)  # False: the answer was cut off
