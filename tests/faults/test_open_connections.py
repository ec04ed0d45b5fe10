"""Connections that are held, or that send little."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time

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
        assert ask(running)[1]["error"]["code"] == "too_many_connections"
    finally:
        for each in held:
            each.close()
    time.sleep(0.3)
    assert ask(running)[0] == 200


@needs_triton
def test_tiny_chunks_are_cut_off(running: Serving):
    """The body that crashes old versions of Triton, sent to the front end instead."""
    host, _, port = address(running).partition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            connection.sendall(head + b"1\r\nx\r\n" * 800_000 + b"0\r\n\r\n")
            assert connection.recv(1) == b""
        assert time.monotonic() - begin < 5
    assert ask(running)[0] == 200
