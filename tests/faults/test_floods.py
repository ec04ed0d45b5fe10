"""Floods of connections, bodies that are too large, and half-sent ones: what a front end does about
them. Most need no Triton behind it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.openai.__main__ import _config
from canvasrt.containers.openai.connections import RESERVED
from canvasrt.containers.openai.parse_turns import SLICE, TURN, Turns
from canvasrt.containers.serve.frontend import FrontEnd
from tests.faults import attack
from tests.faults.flood import CHUNKED, HEAD, TINY, flood, health_delays
from tests.helpers.alone import Alone, connect, is_open
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, serving

MOST = 16 * 2**20
JSON = {"Content-Type": "application/json"}


def keyed(request: bytes, key: str) -> bytes:
    return request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)


@pytest.mark.parametrize("key", ["", "secret"])
def test_health_answers_beside_a_flood_of_tiny_chunks(alone: Alone, key: str):
    """300 connections that send tiny chunks, and begin again when they are closed."""
    front = alone(keys=("secret",))
    host = f"127.0.0.1:{front.port}"
    with flood(host, keyed(TINY, key) if key else TINY, 300):
        delays = health_delays(host, 6)
    assert max(delays) < 2
    assert len(delays) > 5


@needs_triton
def test_an_answer_streams_on_beside_a_flood(
    packaged: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CANVASRT_API_KEYS", "secret")
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        url = f"http://{attack.host_of(running)}/v1"
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)

        def answer() -> tuple[str, float]:
            chat: Any = [{"role": "user", "content": "12+34="}]
            begin = time.monotonic()
            with client.chat.completions.create(
                model="canvasrt", messages=chat, seed=5, max_tokens=40, stream=True
            ) as stream:
                parts = [each.choices[0].delta.content or "" for each in stream if each.choices]
            return "".join(parts), time.monotonic() - begin

        text, seconds = answer()
        with flood(attack.host_of(running), TINY, 300):
            time.sleep(1)
            beside = [answer() for _ in range(3)]
        assert [each[0] for each in beside] == [text] * 3
        assert max(each[1] for each in beside) < seconds + 8
        os.kill(running.said["front_end_pid"], 0)  # it was not replaced


class Counted:
    """Something with so many pieces to parse, each of which takes a millisecond."""

    def __init__(self, turns: Turns, pieces: int) -> None:
        self.turns, self.left = turns, pieces
        self.longest = 0

    def proceed(self) -> None:
        count = 0
        while self.left and self.turns.take(self):
            time.sleep(0.001)
            self.left -= 1
            count += 1
        self.longest = max(self.longest, count)


def test_connections_take_turns_at_being_parsed():
    async def run() -> None:
        turns = Turns()
        long, short = [Counted(turns, 100) for _ in range(5)], Counted(turns, 3)
        for each in (*long, short):
            each.proceed()
        begin, looks = time.monotonic(), []
        while any(each.left for each in long):
            await asyncio.sleep(0)
            looks.append(time.monotonic() - begin)
            begin = time.monotonic()
            if short.left == 0 and len(looks) < 10:
                assert all(each.left > 50 for each in long)
        assert short.left == 0
        assert max(looks) < 4 * TURN
        assert max(each.longest for each in long) <= SLICE / 0.001 + 1

    asyncio.run(run())


def read_reply(connection: socket.socket) -> tuple[int, http.client.HTTPMessage, bytes]:
    reply = http.client.HTTPResponse(connection)
    reply.begin()
    return reply.status, reply.headers, reply.read()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((b"Authorization: Bearer wrong", b"Transfer-Encoding: chunked"), 401),
        ((b"Authorization: Bearer wrong", b"Content-Length: 1000000"), 401),
        ((b"Authorization: Bearer wrong", b"Content-Length: 100", b"Connection: close"), 401),
        ((b"Authorization: Bearer secret", b"Content-Length: 1000000000"), 413),
    ],
)
def test_what_is_refused_by_its_header_is_answered_without_a_body(
    alone: Alone, lines: tuple[bytes, ...], status: int
):
    front = alone(keys=("secret",))
    with connect(front) as connection:
        connection.sendall(HEAD + b"\r\n".join(lines) + b"\r\n\r\n")
        begin = time.monotonic()
        found, headers, _ = read_reply(connection)
        assert found == status
        assert headers["connection"] == "close"
        assert connection.recv(1) == b""  # the end, not a reset
        for _ in range(20):  # what still comes is not refused by a reset at once
            connection.sendall(b"2\r\nxx\r\n" * 1000)
        assert time.monotonic() - begin < 2


def test_a_caller_that_goes_on_after_its_answer_is_cut_off(alone: Alone):
    front = alone(keys=("secret",))
    with connect(front) as connection:
        connection.sendall(HEAD + CHUNKED)
        assert read_reply(connection)[0] == 401
        begin = time.monotonic()
        with pytest.raises(OSError, match=r"reset|pipe"):
            while time.monotonic() - begin < 15:
                connection.sendall(b"2\r\nxx\r\n")
                time.sleep(0.05)
    assert 3 < time.monotonic() - begin < 8


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [MOST + 1, 48 * 2**20])
def test_clients_learn_that_a_body_is_too_large(alone: Alone, chunked: bool, size: int):
    front = alone()
    whole = b"x" * size
    pieces = (whole[begin : begin + 2**20] for begin in range(0, size, 2**20))
    body: Any = pieces if chunked else whole
    reply = httpx.post(f"{front.url}/completions", content=body, headers=JSON, timeout=30)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"


def test_openai_s_client_learns_that_a_body_is_too_large(alone: Alone):
    with openai.OpenAI(base_url=alone().url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(model="canvasrt", prompt="x" * (MOST + 1))
    assert refused.value.status_code == 413


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("header", ["Transfer-Encoding: chunked", "Expect:", "X-Nothing: 1"])
def test_curl_learns_that_a_body_is_too_large(alone: Alone, header: str):
    command = ["curl", "-sS", "-H", JSON["Content-Type"], "-H", header, "--data-binary", "@-"]
    headers = ["-H", "Content-Type: application/json"]
    done = subprocess.run(
        [*command, *headers, f"{alone().url}/completions"],
        input=b"x" * (MOST + 2**20),
        capture_output=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["error"]["code"] == "request_too_large", done.stderr


def test_a_chunked_body_is_refused_where_it_passes_the_limit(alone: Alone):
    front = alone()
    with connect(front) as connection:
        connection.sendall(HEAD + CHUNKED)
        for _ in range(17):
            connection.sendall(b"%x\r\n%s\r\n" % (2**20, b"x" * 2**20))
        assert read_reply(connection)[0] == 413
        assert connection.recv(1) == b""


def half_sent(front: FrontEnd, body: bytes = b"") -> socket.socket:
    connection = connect(front)
    connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + body)
    return connection


def test_half_sent_bodies_make_room(alone: Alone):
    """Every newcomer is served; those whose bodies have not grown for longest are closed."""
    front = alone(max_connections=8)
    held = [half_sent(front) for _ in range(8)]
    try:
        time.sleep(0.5)
        held[0].sendall(b"x" * 5000)  # makes progress
        held[1].sendall(b"x")  # does not
        time.sleep(0.5)
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=5)
            connection.request("GET", "/v1/version")
            assert connection.getresponse().status == 200
            held.append(connection.sock)
        assert eventually(
            lambda: [is_open(each) for each in held[:8]] == [True] + [False] * 3 + [True] * 4
        )
    finally:
        for each in held:
            each.close()


def test_no_more_connections_are_open_than_allowed(alone: Alone):
    front = alone(max_connections=8)
    held = [half_sent(front) for _ in range(100)]
    try:
        assert eventually(lambda: sum(map(is_open, held)) <= 8 + RESERVED)
        assert attack.get(f"127.0.0.1:{front.port}", "/v1/health/live", timeout=5)[0] == 200
    finally:
        for each in held:
            each.close()


def test_slow_metrics_hold_up_nothing_else(alone: Alone):
    """Whoever asks for them: they need no key, and Triton may take long."""
    body = {"model": "canvasrt", "prompt": "x" * 100_000}
    with socket.create_server(("127.0.0.1", 0)) as slow, ThreadPoolExecutor(30) as pool:
        port = slow.getsockname()[1]  # where nobody answers
        front = alone(metrics=f"http://127.0.0.1:{port}/metrics")
        host = f"127.0.0.1:{front.port}"
        begin = time.monotonic()
        asked = [pool.submit(attack.get, host, "/v1/metrics", 30) for _ in range(30)]
        time.sleep(0.5)
        reply = httpx.post(f"{front.url}/completions", json=body, timeout=20)
        assert reply.status_code == 503  # there is no Triton
        assert time.monotonic() - begin < 2.8
        assert all(b"canvasrt_openai_requests_total" in each.result()[1] for each in asked)
        assert time.monotonic() - begin < 7
        slow.setblocking(False)
        with slow.accept()[0], pytest.raises(BlockingIOError):  # it was asked once
            slow.accept()


def test_nobody_says_which_caller_he_is() -> None:
    """The reserved places know callers by their addresses, which `X-Forwarded-For` must not change."""
    assert not _config(None, None).proxy_headers
