"""Connections that are held, or that send little."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import time

import pytest

from canvasrt.containers.openai.connections import RESERVED
from tests.helpers.one_caller import address, ask
from tests.helpers.serving import needs_triton
from tests.helpers.serving_process import Serving


@needs_triton
def test_half_sent_requests_are_closed(running: Serving):
    host, _, port = address(running).partition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        begin = time.monotonic()
        connection.sendall(head)
        for byte in b"ngth: 10"[:6]:  # bytes that trickle in do not help
            time.sleep(1)
            connection.sendall(bytes([byte]))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        assert 5 < time.monotonic() - begin < 15


@needs_triton
def test_health_answers_when_clients_hold_every_connection(running: Serving):
    host, _, port = address(running).partition(":")
    held = []
    try:
        for _ in range(40 + RESERVED + 20):
            each = socket.create_connection((host, int(port)), timeout=30)
            each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            held.append(each)
        for path in ("live", "ready"):
            connection = http.client.HTTPConnection(host, int(port), timeout=5)
            connection.request("GET", f"/v1/health/{path}")
            assert connection.getresponse().status == 200
            connection.close()
        assert ask(running)[0] == 200  # in the place of one that is half-sent
    finally:
        for each in held:
            each.close()
    time.sleep(0.3)
    assert ask(running)[0] == 200


@needs_triton
def test_chunks_of_a_kilobyte_are_taken(running: Serving):
    """As clients send that do not know a body's length; some begin with a few bytes."""
    host, _, port = address(running).partition(":")
    messages = [{"role": "user", "content": "x" * 3_000_000}]
    text = json.dumps({"model": "canvasrt", "messages": messages}).encode()
    sizes = [*range(1, 20), *[1000] * (len(text) // 1000 + 1)]
    begins = itertools.accumulate(sizes, initial=0)
    chunks = (text[begin : begin + size] for begin, size in zip(begins, sizes, strict=False))
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request(
        "POST",
        "/v1/chat/completions",
        (each for each in chunks if each),
        headers,
        encode_chunked=True,
    )
    reply = connection.getresponse()
    assert reply.status == 400
    assert json.loads(reply.read())["error"]["code"] == "context_length_exceeded"


@needs_triton
@pytest.mark.parametrize("size", [1, 2, 8, 64, 200])
def test_tiny_chunks_are_cut_off(running: Serving, size: int):
    """The body that crashes old versions of Triton, sent to the front end instead, and larger
    chunks, each of which costs as much time. No key is needed to send them."""
    host, _, port = address(running).partition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            connection.sendall(head + b"%x\r\n%s\r\n" % (size, b"x" * size) * 100_000)
            assert connection.recv(1) == b""
        assert time.monotonic() - begin < 5
    assert ask(running)[0] == 200
