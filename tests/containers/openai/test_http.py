"""Features of HTTP: request ids, CORS, and compression."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from tests.helpers.serving import eventually, needs_triton

pytestmark = needs_triton
PAGE = "https://app.example.com"
JSON = {"Content-Type": "application/json"}


def ask(
    front: FrontEnd, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply, data


@pytest.fixture(scope="module")
def open_front(server: Server) -> Iterator[FrontEnd]:
    """A front end that a page of another origin may call."""
    with FrontEnd.over(server, FrontOptions(port=0, origins=(PAGE,), keys=("k",))) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/models", "/v1/health/live", "/nothing"])
def test_the_caller_s_id_is_echoed(front: FrontEnd, path: str) -> None:
    for given in ("abc-123", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a" * 128):
        assert (
            ask(front, "GET", path, {"X-Request-ID": given})[0].getheader("x-request-id") == given
        )


@pytest.mark.parametrize("given", ["", "two words", "a" * 129, "é", 'quote"', "a;b"])
def test_other_ids_are_replaced(front: FrontEnd, given: str) -> None:
    reply, _ = ask(
        front, "GET", "/v1/models", {"X-Request-ID": given.encode("latin-1").decode("latin-1")}
    )
    made = reply.getheader("x-request-id", "")
    assert made.startswith("req_")
    assert len(made) == 36
    assert len(reply.headers.get_all("x-request-id", [])) == 1


def test_the_log_has_the_id(front: FrontEnd, server: Server) -> None:
    ask(front, "GET", "/v1/models", {"X-Request-ID": "find-me-in-the-log"})
    assert server.log is not None
    assert eventually(lambda: "find-me-in-the-log" in Path(server.log).read_text())


def test_pages_elsewhere_may_call_if_they_are_named(open_front: FrontEnd) -> None:
    wanted = {"Access-Control-Request-Method": "POST"}
    wanted |= {"Access-Control-Request-Headers": "authorization,content-type"}
    preflight, _ = ask(open_front, "OPTIONS", "/v1/chat/completions", {"Origin": PAGE, **wanted})
    assert preflight.status == 200
    assert preflight.getheader("access-control-allow-origin") == PAGE
    assert "authorization" in preflight.getheader("access-control-allow-headers", "").lower()
    other, _ = ask(
        open_front, "OPTIONS", "/v1/chat/completions", {"Origin": "https://evil.com", **wanted}
    )
    assert other.status == 400
    assert other.getheader("access-control-allow-origin") is None
    # The page must also be able to read errors.
    for key, size, status in (("k", 0, 200), ("wrong", 0, 401), ("k", 10**12, 413)):
        headers = {"Authorization": f"Bearer {key}", "Content-Length": str(size)}
        reply, _ = ask(open_front, "GET", "/v1/models", {"Origin": PAGE, **headers})
        assert reply.status == status
        assert reply.getheader("access-control-allow-origin") == PAGE
        assert "x-request-id" in reply.getheader("access-control-expose-headers", "").lower()


def test_without_the_option_no_page_may(front: FrontEnd) -> None:
    reply, _ = ask(front, "GET", "/v1/models", {"Origin": PAGE})
    assert reply.getheader("access-control-allow-origin") is None
    wanted = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    assert ask(front, "OPTIONS", "/v1/chat/completions", wanted)[0].status == 405


def test_long_replies_are_compressed_for_those_who_ask(front: FrontEnd) -> None:
    plain, page = ask(front, "GET", "/", {})
    assert plain.getheader("content-encoding") is None
    packed, data = ask(front, "GET", "/", {"Accept-Encoding": "gzip"})
    assert packed.getheader("content-encoding") == "gzip"
    assert "accept-encoding" in packed.getheader("vary", "").lower()
    assert gzip.decompress(data) == page
    assert len(data) < len(page) / 2
    short, _ = ask(front, "GET", "/v1/models", {"Accept-Encoding": "gzip"})
    assert short.getheader("content-encoding") is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_streams_are_not(front: FrontEnd, path: str) -> None:
    question = [{"role": "user", "content": "12+34="}]
    own = {"options": {"num_predict": 200}} if path == "/api/chat" else {"max_tokens": 200}
    body = {"model": "canvasrt", "messages": question, "stream": True, **own}
    reply, data = ask(
        front, "POST", path, {**JSON, "Accept-Encoding": "gzip"}, json.dumps(body).encode()
    )
    assert reply.status == 200
    assert reply.getheader("content-encoding") is None
    assert b'"canvasrt"' in data
