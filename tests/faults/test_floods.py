"""The front end under floods of connections, too large bodies, and half-sent bodies. Most tests need no Triton."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.openai.__main__ import _config
from canvasrt.containers.openai.connections import RESERVED, Places
from canvasrt.containers.openai.fair_parsing import TURN, Turns
from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.alone import Alone, connect, is_open
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, JSON, call, serving

pytestmark = pytest.mark.acceptance

MOST = 16 * 2**20
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
TINY = HEAD + CHUNKED + b"2\r\nxx\r\n" * 50_000


@contextlib.contextmanager
def flood(host: str, request: bytes, connections: int) -> Iterator[None]:
    """From a separate process, send a request on each of `connections` connections, and open a new one whenever one
    ends."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(host, request, connections), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _run(host: str, request: bytes, connections: int) -> None:
    asyncio.run(_all(host, request, connections))


async def _all(host: str, request: bytes, connections: int) -> None:
    await asyncio.gather(*(_one(host, request) for _ in range(connections)))


async def _one(host: str, request: bytes) -> None:
    name, _, port = host.partition(":")
    while True:
        try:
            reader, writer = await asyncio.open_connection(name, int(port))
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.write(request)
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass
        writer.transport.abort()


def keyed(request: bytes, key: str) -> bytes:
    return request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)


@pytest.mark.parametrize("key", ["", "secret"])
def test_health_answers_beside_a_flood_of_tiny_chunks(alone: Alone, key: str):
    """300 connections send tiny chunks, and are opened again when they are closed."""
    front = alone(keys=("secret",))
    host = f"127.0.0.1:{front.port}"
    with flood(host, keyed(TINY, key) if key else TINY, 300):
        for _ in range(30):
            assert call(host, "/v1/health/live")[0] == 200


@needs_triton
def test_an_answer_streams_on_beside_a_flood(
    packaged: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CANVASRT_API_KEYS", "secret")
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        url = f"http://{running.host}/v1"
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)

        def answer() -> str:
            chat: Any = [{"role": "user", "content": "12+34="}]
            with client.chat.completions.create(
                model="canvasrt", messages=chat, seed=5, max_tokens=40, stream=True
            ) as stream:
                parts = [each.choices[0].delta.content or "" for each in stream if each.choices]
            return "".join(parts)

        text = answer()
        with flood(running.host, TINY, 300):
            assert [answer() for _ in range(3)] == [text] * 3
        os.kill(running.said["front_end_pid"], 0)  # still the same process


class Counted:
    """A connection with `pieces` pieces to parse. Each takes a millisecond."""

    def __init__(self, turns: Turns, pieces: int) -> None:
        self.turns, self.left = turns, pieces
        self.longest = 0

    def read_on(self) -> None:
        count = 0
        while self.left and self.turns.has(self):
            time.sleep(0.001)
            self.left -= 1
            count += 1
        self.longest = max(self.longest, count)


def test_connections_take_turns_at_being_parsed():
    async def run() -> None:
        turns = Turns()
        long, short = [Counted(turns, 100) for _ in range(5)], Counted(turns, 3)
        for each in (*long, short):
            each.read_on()
        looks = 0
        while any(each.left for each in long):
            left = sum(each.left for each in long)
            await asyncio.sleep(0)
            looks += 1
            # Other tasks of the event loop run after every turn.
            assert left - sum(each.left for each in long) <= TURN / 0.001 + 1
            if short.left == 0 and looks < 10:
                assert all(each.left > 50 for each in long)
        assert short.left == 0
        assert max(each.longest for each in long) <= TURN / 0.001 + 1

    asyncio.run(run())


def read_reply(connection: socket.socket) -> tuple[int, http.client.HTTPMessage, bytes]:
    reply = http.client.HTTPResponse(connection)
    reply.begin()
    return reply.status, reply.headers, reply.read()


def test_what_is_refused_by_its_header_is_answered_without_a_body(alone: Alone):
    front = alone(keys=("secret",))
    for status, lines in (
        (401, (b"Authorization: Bearer wrong", b"Transfer-Encoding: chunked")),
        (401, (b"Authorization: Bearer wrong", b"Content-Length: 1000000")),
        (401, (b"Authorization: Bearer wrong", b"Content-Length: 100", b"Connection: close")),
        (413, (b"Authorization: Bearer secret", b"Content-Length: 1000000000")),
    ):
        with connect(front) as connection:
            connection.sendall(HEAD + b"\r\n".join(lines) + b"\r\n\r\n")
            found, headers, _ = read_reply(connection)
            assert found == status
            assert headers["connection"] == "close"
            assert connection.recv(1) == b""  # an orderly end, not a reset
            for _ in range(20):  # later bytes do not cause a reset at once
                connection.sendall(b"2\r\nxx\r\n" * 1000)


def test_a_caller_that_goes_on_after_its_answer_is_cut_off(alone: Alone):
    front = alone(keys=("secret",))
    begin = time.monotonic()
    with connect(front) as connection:
        connection.sendall(HEAD + CHUNKED)
        assert read_reply(connection)[0] == 401
        with pytest.raises(OSError, match=r"reset|pipe"):
            while time.monotonic() - begin < 60:
                connection.sendall(b"2\r\nxx\r\n")
                time.sleep(0.05)
    assert time.monotonic() - begin > 3


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [MOST + 1, 48 * 2**20])
def test_clients_learn_that_a_body_is_too_large(front: FrontEnd, chunked: bool, size: int):
    whole = b"x" * size
    pieces = (whole[begin : begin + 2**20] for begin in range(0, size, 2**20))
    body: Any = pieces if chunked else whole
    reply = httpx.post(f"{front.url}/completions", content=body, headers=JSON, timeout=60)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("header", ["Transfer-Encoding: chunked", "Expect:", "X-Nothing: 1"])
def test_curl_learns_that_a_body_is_too_large(front: FrontEnd, header: str):
    command = ["curl", "-sS", "-H", JSON["Content-Type"], "-H", header, "--data-binary", "@-"]
    headers = ["-H", "Content-Type: application/json"]
    done = subprocess.run(
        [*command, *headers, f"{front.url}/completions"],
        input=b"x" * (MOST + 2**20),
        capture_output=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["error"]["code"] == "request_too_large", done.stderr


def test_a_chunked_body_is_refused_where_it_passes_the_limit(front: FrontEnd):
    with connect(front) as connection:
        connection.sendall(HEAD + CHUNKED)
        for _ in range(17):
            connection.sendall(b"%x\r\n%s\r\n" % (2**20, b"x" * 2**20))
        assert read_reply(connection)[0] == 413


def half_sent(front: FrontEnd) -> socket.socket:
    connection = connect(front)
    connection.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
    return connection


def test_no_more_connections_are_open_than_allowed(alone: Alone):
    front = alone(max_connections=8)
    held = [half_sent(front) for _ in range(100)]
    try:
        assert eventually(lambda: sum(map(is_open, held)) <= 8 + RESERVED)
        assert call(f"127.0.0.1:{front.port}", "/v1/health/live")[0] == 200
    finally:
        for each in held:
            each.close()


def test_slow_metrics_hold_up_nothing_else(alone: Alone):
    """Anybody may ask for metrics, since they need no key, and Triton may take long to provide them."""
    body = {"model": "canvasrt", "prompt": "x" * 100_000}
    with socket.create_server(("127.0.0.1", 0)) as slow, ThreadPoolExecutor(30) as pool:
        port = slow.getsockname()[1]  # this port never answers
        front = alone(metrics=f"http://127.0.0.1:{port}/metrics")
        host = f"127.0.0.1:{front.port}"
        asked = [pool.submit(call, host, "/v1/metrics") for _ in range(30)]
        with slow.accept()[0]:
            reply = httpx.post(f"{front.url}/completions", json=body, timeout=60)
            assert reply.status_code == 503  # no Triton
            assert all(b"canvasrt_openai_requests_total" in each.result()[1] for each in asked)
            slow.setblocking(False)
            with pytest.raises(BlockingIOError):  # Triton was asked only once
                slow.accept()


def test_nobody_says_which_caller_he_is() -> None:
    """Reserved places depend on the caller's address, which `X-Forwarded-For` must not change."""
    assert not _config(None, Places(1)).proxy_headers
