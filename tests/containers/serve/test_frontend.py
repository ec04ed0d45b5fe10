"""The front end's life: callers that hang up, loading, dying, draining."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve import frontend
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.errors import CanvasError
from tests.helpers.serving import ENDLESS, eventually, metric, needs_triton

pytestmark = needs_triton
QUESTION: Any = [{"role": "user", "content": "12+34="}]


@contextlib.contextmanager
def asking(front: FrontEnd, **fields: Any) -> Iterator[http.client.HTTPConnection]:
    """A request that has been sent, on a connection that can be closed."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    body = {"model": "canvasrt", "messages": QUESTION, **fields}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    try:
        yield connection
    finally:
        connection.close()


def in_flight(server: Server) -> float:
    return metric(server, "canvasrt_requests_in_flight")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_ends_the_request_in_triton(
    front: FrontEnd, server: Server, stream: bool, n: int
):
    with asking(front, stream=stream, n=n, **ENDLESS):
        assert eventually(lambda: in_flight(server) == n)
    assert eventually(lambda: in_flight(server) == 0)


def test_waiting_requests_and_canvases_are_told(front: FrontEnd, server: Server):
    with asking(front, n=6, **ENDLESS):
        assert eventually(lambda: metric(server, "canvasrt_requests_waiting") == 2)
        assert eventually(lambda: metric(server, "canvasrt_active_canvases") == 4)
    assert eventually(lambda: in_flight(server) == 0)
    assert eventually(lambda: metric(server, "canvasrt_requests_waiting") == 0)
    assert eventually(lambda: metric(server, "canvasrt_active_canvases") == 0)


def test_hanging_up_in_the_middle_of_a_stream_ends_the_request(front: FrontEnd, server: Server):
    slow = {"max_denoising_steps": 300, "stability_threshold": 10_000, "seed": 7}
    with asking(front, stream=True, max_tokens=4000, **slow) as connection:
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: {")
        assert in_flight(server) == 1
    assert eventually(lambda: in_flight(server) == 0)


def test_until_the_model_is_loaded_requests_are_put_off(server: Server):
    front = FrontEnd.over(server, FrontOptions(port=0))
    front.start()
    try:
        for phase, says in (("building", "built"), ("loading", "loaded")):
            front.notify(phase, "More.")  # type: ignore[arg-type]
            assert eventually(lambda: status(front, "/v1/health/live")[1]["phase"] == phase)  # noqa: B023
            with asking(front) as connection:
                reply = connection.getresponse()
                error = json.loads(reply.read())["error"]
            assert reply.status == 503
            assert int(reply.getheader("retry-after") or 0) > 0
            assert (error["code"], error["type"]) == (phase, "service_unavailable")
            assert says in error["message"]
            assert error["message"].endswith("More.")
            assert status(front, "/v1/health/ready")[0] == 503
    finally:
        front.stop(grace=5)


def status(front: FrontEnd, path: str, port: int | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port or front.port, timeout=30)
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def test_without_triton_it_is_alive_and_not_ready():
    options = FrontOptions(port=0)
    with FrontEnd(options, "127.0.0.1:9", "http://127.0.0.1:9/metrics", None) as front:
        assert status(front, "/v1/health/live")[0] == 200
        assert status(front, "/v1/health/ready")[0] == 503
        with OpenAI(base_url=front.url, api_key="none", max_retries=0) as client:
            with pytest.raises(sdk.InternalServerError) as caught:
                client.chat.completions.create(model="canvasrt", messages=QUESTION)
            assert caught.value.status_code == 503


def test_ready_is_said_when_callers_are_let_in(server: Server):
    front = FrontEnd.over(server, FrontOptions(port=0))
    front.start()
    try:
        assert eventually(lambda: status(front, "/v1/health/live")[1]["phase"] == "starting")
        assert front.pid
        os.kill(front.pid, signal.SIGSTOP)  # as slow as a busy machine can make it
        front.notify("serving")
        waiting = threading.Thread(target=front.wait_acknowledged)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        os.kill(front.pid, signal.SIGCONT)
        waiting.join(5)
        assert not waiting.is_alive()
        assert status(front, "/v1/models")[0] == 200
    finally:
        front.stop(grace=5)


def test_a_front_end_that_has_accepted_no_request_is_not_waited_for(server: Server):
    front = FrontEnd.over(server, FrontOptions(port=0))
    front.start()
    assert front.pid
    os.kill(front.pid, signal.SIGSTOP)  # as slow as a busy machine can make it
    assert front.stop(grace=1)


def test_health_can_have_a_port_of_its_own(server: Server):
    with FrontEnd.over(server, FrontOptions(port=0, health_port=0)) as front:
        assert front.health_port
        assert status(front, "/v1/health/ready", front.health_port)[0] == 200
        assert status(front, "/v1/models", front.health_port)[0] == 404


def test_a_front_end_that_dies_is_replaced_and_no_caller_is_turned_away(server: Server):
    with FrontEnd.over(server, FrontOptions(port=0)) as front:
        assert status(front, "/v1/health/ready")[0] == 200
        first = front.pid
        assert first
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: dead(front))
        waiting = threading.Thread(target=lambda: replies.append(status(front, "/v1/models")))
        replies: list[Any] = []
        waiting.start()
        front.check_alive()
        waiting.join(30)
        assert replies[0][0] == 200
        assert front.pid != first


def test_a_front_end_that_hangs_before_its_first_beat_is_replaced(server: Server, monkeypatch: Any):
    monkeypatch.setattr(frontend, "_FIRST_BEAT", 0.5)
    front = FrontEnd.over(server, FrontOptions(port=0))
    front.start()
    try:
        first = front.pid
        assert first
        os.kill(first, signal.SIGSTOP)
        time.sleep(0.6)
        front.check_alive()
        assert front.pid != first
        assert status(front, "/v1/health/live")[0] == 200
    finally:
        front.stop(grace=0)


def test_a_front_end_that_cannot_live_is_given_up(server: Server, monkeypatch: Any):
    monkeypatch.setattr(frontend, "_BACKOFF", (0.0,))
    front = FrontEnd.over(server, FrontOptions(port=0, log_level="NONSENSE"))
    front.start()
    try:
        with pytest.raises(CanvasError, match="front end stopped with exit code 1, 6 times"):
            for _ in range(20):
                assert eventually(lambda: dead(front))
                front.check_alive()
    finally:
        front.stop(grace=0)


def dead(front: FrontEnd) -> bool:
    return front._process is not None and front._process.poll() is not None


def test_stopping_lets_answers_finish_and_takes_no_more(server: Server):
    front = FrontEnd.over(server, FrontOptions(port=0))
    with front:
        answers: list[Any] = []

        def ask() -> None:
            with OpenAI(base_url=front.url, api_key="none", max_retries=0) as client:
                answers.append(
                    client.chat.completions.create(
                        model="canvasrt",
                        messages=QUESTION,
                        max_tokens=4,
                        extra_body={**ENDLESS, "max_denoising_steps": 300},
                    )
                )

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: in_flight(server) == 3)
        assert front.stop(grace=300)
        for thread in threads:
            thread.join(10)
    assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * 3
    with pytest.raises(OSError, match="refused"):
        http.client.HTTPConnection("127.0.0.1", front.port, timeout=5).connect()


def test_while_it_stops_new_requests_are_sent_away(server: Server):
    front = FrontEnd.over(server, FrontOptions(port=0))
    with front, asking(front, **ENDLESS):
        assert eventually(lambda: in_flight(server) == 1)
        front.notify("stopping")
        assert eventually(lambda: status(front, "/v1/health/ready")[0] == 503)
        with asking(front) as connection:
            reply = connection.getresponse()
            assert reply.status == 503
            assert reply.getheader("connection") == "close"
            assert json.loads(reply.read())["error"]["code"] == "stopping"


def test_what_takes_longer_than_the_grace_is_cut_off(server: Server):
    front = FrontEnd.over(server, FrontOptions(port=0))
    with front, asking(front, **ENDLESS) as connection:
        assert eventually(lambda: in_flight(server) == 1)
        assert not front.stop(grace=0.5)
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.getresponse()
    assert eventually(lambda: in_flight(server) == 0)
