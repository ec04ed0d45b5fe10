"""Remote images are fetched only from public addresses, even if a URL hides a private one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from canvasrt.containers.openai import remote
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.remote import Fetcher, Refused, inline, is_public

PRIVATE = [
    "192.88.99.1",
    "3fff::1",
    "2606:4700::5efe:a00:1",
    "2606:4700::200:5efe:a00:1",
    "127.0.0.1",
    "127.8.8.8",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "255.255.255.255",
    "224.0.0.1",
    "240.0.0.1",
    "198.18.0.1",
    "::1",
    "::",
    "fe80::1%eth0",
    "fec0::1",
    "fd00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "2001:db8::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Host"]))  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/slow":
            for _ in range(50):
                self.wfile.write(b"x")
                time.sleep(0.1)
        pieces = 1 if self.path != "/large" else 400
        try:
            for _ in range(pieces):
                self.wfile.write(b"x" * (1 << 16))
        except OSError:
            return

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def site() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


# Hosts of these tests. The test's site on 127.0.0.1 counts as public.
HOSTS = {
    "public.test": ["127.0.0.1"],
    "inner.test": ["10.0.0.7"],
    "both.test": ["127.0.0.1", "::1"],
}


def fetcher(seen: list[str] | None = None) -> Fetcher:
    def resolve(host: str, port: int) -> list[str]:
        if seen is not None:
            seen.append(host)
        return HOSTS.get(host, [host])

    return Fetcher(resolve, allowed=lambda address: address == "127.0.0.1")


def test_a_redirect_to_no_url_is_refused(site: Any) -> None:
    with pytest.raises(Refused, match="the URL is not valid"):
        fetcher().fetch(f"http://public.test:{site.server_port}/to/http://[")


def test_an_image_is_fetched_with_its_hosts_name(site: Any) -> None:
    port = site.server_address[1]
    seen: list[str] = []
    data = fetcher(seen).fetch(f"http://public.test:{port}/a%20b?q=1")
    assert data == b"x" * (1 << 16)
    assert site.seen == [("/a%20b?q=1", f"public.test:{port}")]
    assert seen == ["public.test"], "a second look-up could return another address"


def test_slow_servers_take_no_threads_of_others() -> None:
    """Fetching does not use asyncio's default threads, which read long bodies."""
    slow = threading.Event()

    class Slow(Fetcher):
        def fetch(self, url: str, budget: Any = None) -> bytes:
            slow.wait(120)
            return b""

    async def run() -> None:
        fetcher = Slow()
        waiting = [asyncio.create_task(fetcher.fetched("http://slow.test")) for _ in range(100)]
        await asyncio.sleep(0.1)
        try:
            await asyncio.wait_for(asyncio.to_thread(time.monotonic), 60)
        finally:
            slow.set()
        await asyncio.gather(*waiting)
        fetcher.close()

    asyncio.run(run())


def test_a_redirect_is_followed(site: Any) -> None:
    port = site.server_address[1]
    assert fetcher().fetch(f"http://public.test:{port}/to//image")
    assert fetcher().fetch(f"http://public.test:{port}/to/http://public.test:{port}/image")


REFUSED = {
    "private": ("http://inner.test:{port}/", "inner.test is not a public address"),
    "partly private": ("http://both.test:{port}/", "both.test is not a public address"),
    "redirected": ("http://public.test:{port}/to/http://inner.test/", "inner.test is not a public"),
    "to a file": ("http://public.test:{port}/to/file:///etc/passwd", "neither http nor https"),
    "in a circle": ("http://public.test:{port}/to/to/to/to/to/x", "more than 3 times"),
    "credentials": ("http://me:secret@public.test:{port}/", "has credentials"),
    "missing": ("http://public.test:{port}/missing", "status 404"),
    "large": ("http://public.test:{port}/large", "larger than 20 MiB"),
    "no port": ("http://public.test:99999/", "not valid"),
    "a line": ("http://public.test:{port}/a\u00a0b", "must be escaped"),
    "another scheme": ("ftp://public.test/", "neither http nor https"),
    "no host": ("http:///x", "neither http nor https"),
}


@pytest.mark.parametrize(("url", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_why(site: Any, url: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        fetcher().fetch(url.format(port=site.server_address[1]))


def test_a_slow_server_is_given_up(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps the connection alive with single bytes."""
    monkeypatch.setattr(remote, "FETCH_TIMEOUT", 0.5)
    with pytest.raises(Refused, match=r"longer than 0.5 seconds|cannot be fetched"):
        fetcher().fetch(f"http://public.test:{site.server_address[1]}/slow")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f000001", "127.1", "[::ffff:7f00:1]"],
)
def test_this_machine_is_refused_by_any_name(site: Any, host: str) -> None:
    with pytest.raises(Refused, match=r"not a public address|cannot be resolved"):
        Fetcher().fetch(f"http://{host}:{site.server_address[1]}/")
    assert site.seen == []


def test_the_images_of_a_chat_become_data_urls(site: Any) -> None:
    port = site.server_address[1]
    kept = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "text"},
        {
            "role": "user",
            "content": [
                kept,
                {"type": "image_url", "image_url": {"url": f"HTTP://public.test:{port}/i"}},
            ],
        },
    ]
    asyncio.run(inline(chat, fetcher()))
    assert chat[1]["content"][0] == kept
    assert chat[1]["content"][1]["image_url"]["url"].startswith("data:;base64,eHh4")
    chat[1]["content"][1]["image_url"]["url"] = "http://inner.test/"
    with pytest.raises(ApiError, match=r"inner.test is not a public address") as error:
        asyncio.run(inline(chat, fetcher()))
    assert (error.value.status, error.value.param) == (
        400,
        "messages[1].content[1].image_url.url",
    )
