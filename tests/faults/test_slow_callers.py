"""Callers that send or read slowly, never, or in tiny pieces. Their connections are closed in time. The tests shorten
the limits."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canvasrt.containers.openai import connections
from canvasrt.containers.openai.tls import server_context
from tests.helpers.alone import is_open, listening
from tests.helpers.certificates import tls_files
from tests.helpers.serving import eventually

HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
SOON = 0.5  # seconds
# The limits in the order in which they apply to a connection.
LIMITS = ("HEADER_TIMEOUT", "BODY_TIMEOUT", "WRITE_TIMEOUT")
Shorten = Callable[..., None]


@pytest.fixture
def shorten(monkeypatch: pytest.MonkeyPatch) -> Shorten:
    """Return a function that shortens one limit, and makes the others longer than any test."""

    def change(name: str, seconds: float = SOON) -> None:
        for each in LIMITS:
            monkeypatch.setattr(connections, each, seconds if each == name else 600.0)

    return change


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads a whole body and answers with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


async def long(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answer exceeds every buffer."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for left in reversed(range(8000)):
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": left > 0})


@contextlib.contextmanager
def calling(port: int, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(sent)
        yield connection


def is_cut_off(connection: socket.socket, begin: float, drip: bytes = b"") -> bool:
    """Send `drip` periodically; return whether the connection ends in its time, which is counted from `begin`."""
    while is_open(connection) and time.monotonic() - begin < 60:
        with contextlib.suppress(OSError):
            connection.send(drip)
        time.sleep(0.05)
    return 0.5 * SOON < time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("limit", "sent"),
    [
        ("HEADER_TIMEOUT", HEAD[:20]),
        ("BODY_TIMEOUT", HEAD % 10_000),
    ],
    ids=["header", "body"],
)
def test_headers_and_bodies_that_trickle_in_are_cut_off(shorten: Shorten, limit: str, sent: bytes):
    shorten(limit)
    begin = time.monotonic()
    with listening(reading) as (port, places), calling(port, sent) as connection:
        assert is_cut_off(connection, begin, b"x")
        assert places.open == 0


def test_a_connection_is_kept_for_the_next_request_but_not_for_half_a_header(shorten: Shorten):
    shorten("")
    with listening(reading) as (port, _), calling(port) as connection:
        for _ in range(2):
            connection.sendall(HEAD % 0)
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                piece = connection.recv(1000)
                assert piece, "the connection was closed"
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
            shorten("HEADER_TIMEOUT")
            time.sleep(3 * SOON)
        assert is_cut_off(connection, time.monotonic(), b"x")
    # OpenAI's client (httpx) reuses idle connections for 5 seconds, and load balancers for 60. The server must keep
    # them longer.
    assert connections.KEEP_ALIVE > 60


def test_a_caller_that_reads_nothing_is_closed(shorten: Shorten):
    shorten("WRITE_TIMEOUT")
    with listening(long) as (port, places), calling(port, HEAD % 0) as connection:
        assert connection.recv(1)  # the answer has begun
        assert eventually(lambda: places.open == 0, 60)


def test_a_caller_that_reads_now_and_then_is_not(shorten: Shorten):
    shorten("WRITE_TIMEOUT", 6 * SOON)  # a busy machine is slow between two reads
    with listening(long) as (port, places), calling(port, HEAD % 0) as connection:
        begin = time.monotonic()
        while time.monotonic() - begin < 9 * SOON:
            for _ in range(4):  # together less than the whole answer
                assert connection.recv(1 << 20)
            time.sleep(SOON / 10)
        assert places.open == 1


@pytest.fixture
def context(certificates: Path) -> ssl.SSLContext:
    return server_context(tls_files(certificates))


@pytest.mark.parametrize("drip", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "begun"])
def test_handshakes_that_do_not_end_are_cut_off(
    shorten: Shorten, context: ssl.SSLContext, drip: bytes
):
    shorten("HEADER_TIMEOUT")
    begin = time.monotonic()
    with listening(reading, context=context) as (port, places), calling(port, drip) as connection:
        assert is_cut_off(connection, begin)
        assert places.open == 0


def test_handshakes_that_fail_give_their_places_back(shorten: Shorten, context: ssl.SSLContext):
    shorten("")
    with listening(reading, context=context) as (port, places):
        for sent in (b"", HEAD % 0):  # one caller leaves, one speaks no TLS
            with calling(port) as connection:
                assert eventually(lambda: places.open == 1)
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                assert eventually(lambda: places.open == 0)
        assert not places.idle


def test_bodies_hold_so_much_memory_together(shorten: Shorten, monkeypatch: pytest.MonkeyPatch):
    """When all bodies together reach the limit, large bodies are cut off, but short ones are accepted."""
    shorten("")
    monkeypatch.setattr(connections, "_MOST_HELD", 5 * 2**20)
    part = b"x" * 3 * 2**20
    with listening(reading) as (port, places), contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(calling(port, HEAD % (4 * 2**20))) for _ in range(2))
        first.sendall(part)
        assert eventually(lambda: places.held == len(part))
        with contextlib.suppress(OSError):
            second.sendall(part)
        assert eventually(lambda: places.open == 1)
        assert places.held <= 5 * 2**20
        short = stack.enter_context(calling(port, HEAD % 4 + b"xxxx"))
        assert short.recv(100).startswith(b"HTTP/1.1 200")
        assert is_open(first)
        first.settimeout(60)
        first.sendall(b"x" * 2**20)
        assert first.recv(100).startswith(b"HTTP/1.1 200")
    assert places.held == 0


def test_half_sent_bodies_make_room(shorten: Shorten):
    """New connections are served. To make room, the connections whose bodies stopped growing first are closed."""
    shorten("")
    with listening(reading) as (port, places), contextlib.ExitStack() as stack:
        held: list[socket.socket] = []

        def has_read(size: int) -> bool:
            return eventually(lambda: places.held == size)

        for count in range(1, places.limit + 1):  # one after the other
            held.append(stack.enter_context(calling(port, HEAD % 10_000 + b"x")))
            assert has_read(count)
        held[0].sendall(b"x" * 5000)  # makes progress
        assert has_read(5008)
        held[1].sendall(b"x")  # does not
        assert has_read(5009)
        for _ in range(3):
            newcomer = stack.enter_context(calling(port, HEAD % 0))
            assert newcomer.recv(100).startswith(b"HTTP/1.1 200")
        kept = [True] + [False] * 3 + [True] * 4
        assert eventually(lambda: [is_open(each) for each in held] == kept)


CHUNKED = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 64, 200])
def test_tiny_chunks_are_cut_off(shorten: Shorten, size: int):
    """A body in chunks of two bytes crashes old versions of Triton, and parsing a tiny chunk takes as long as a large
    one. Other callers are answered meanwhile."""
    shorten("")
    with listening(reading) as (port, places), calling(port, CHUNKED) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"%x\r\n%s\r\n" % (size, b"x" * size) * 50_000)
            assert connection.recv(1) == b""
        with calling(port, HEAD % 4 + b"xxxx") as other:
            assert other.recv(100).startswith(b"HTTP/1.1 200")
        assert eventually(lambda: places.open == 0)
        assert places.held == 0


def test_chunks_of_a_kilobyte_are_taken(shorten: Shorten):
    """Clients that do not know the length of a body send such chunks; some begin with small ones."""
    shorten("")
    sizes = [*range(1, 20), *[1000] * 3000]
    body = b"".join(b"%x\r\n%s\r\n" % (size, b"x" * size) for size in sizes)
    with listening(reading) as (port, _), calling(port, CHUNKED + body + b"0\r\n\r\n") as caller:
        reply = http.client.HTTPResponse(caller)
        reply.begin()
        assert reply.read() == b"%d" % sum(sizes)


def test_requests_follow_each_other_on_one_connection(shorten: Shorten):
    """This includes requests that are sent in parts before the previous answer arrives."""
    shorten("")
    post = HEAD % 3 + b"abc"
    get = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with (
        listening(reading) as (port, places),
        calling(port, post + get + post + get[:20]) as caller,
    ):
        time.sleep(0.2)
        caller.sendall(get[20:] + CHUNKED + b"3\r\nabc\r\n" * 100 + b"0\r\n\r\n")
        found = b""
        while not found.endswith(b"300\r\n0\r\n\r\n"):
            found += caller.recv(1 << 16)
        assert found.count(b"HTTP/1.1 200 OK") == 5
        assert eventually(lambda: (places.open, places.held) == (1, 0))


def test_a_caller_that_has_left_may_be_answered_early(shorten: Shorten):
    """The application answers before it asks for the body, so it does not know that the caller left."""
    shorten("")
    go, ended, raised = threading.Event(), threading.Event(), list[BaseException]()

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(go.wait, 60)
        try:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})
        except BaseException as error:
            raised.append(error)
        ended.set()

    with listening(refusing) as (port, places):
        with calling(port, HEAD.replace(b"POST", b"HEAD") % 10_000):
            assert eventually(lambda: places.open == 1)
        go.set()
        assert ended.wait(60)
        assert not raised
        assert eventually(lambda: places.open == 0)


def test_a_head_request_with_two_lengths_ends_its_connection(
    shorten: Shorten, capsys: pytest.CaptureFixture[str]
):
    """The reply to a HEAD request must have no body: writing one raises an error, which asyncio logs."""
    shorten("")
    head = CHUNKED.replace(b"POST", b"HEAD").replace(b"Host", b"Content-Length: 4\r\nHost")
    with listening(reading) as (port, places), calling(port, head) as caller:
        assert caller.recv(100).startswith(b"HTTP/1.1 400")
        assert eventually(lambda: places.open == 0)
    assert "Fatal error" not in capsys.readouterr().err
