"""Fetches images from public addresses, and from no others: a request must not reach into the
server's own network."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin, urlsplit

from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.messages import is_remote

MAX_IMAGE_BYTES = 20 * 2**20
FETCH_TIMEOUT = 10.0  # seconds for one image, redirects included
REDIRECTS = 3
MAX_REMOTE_IMAGES = 16  # of one request
_THREADS = 32
# They carry an IPv4 address inside, which may be anything: 6to4, Teredo and NAT64.
_TUNNELS = tuple(
    ipaddress.ip_network(each)
    for each in ("2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48")
)


class Refused(Exception):
    """The image is not fetched; the message says why."""


def is_public(address: str) -> bool:
    """Return whether an address leads out of every private network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.is_site_local or any(ip in network for network in _TUNNELS):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class Fetcher:
    """Fetches images by URL, on threads of its own.

    `resolve` returns a host's addresses, and `allowed` says which may be connected to. Every address
    of a host must be allowed, and the connection goes to one that was checked: a second look-up
    could return another.
    """

    def __init__(
        self,
        resolve: Callable[[str, int], list[str]] | None = None,
        allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._resolve = resolve or _addresses
        self._allowed = allowed
        # Of their own: what waits for a slow server must hold up nothing else.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="canvasrt-fetch")

    async def fetched(self, url: str) -> str:
        """Return the data URL of an image, like `fetch`, without blocking."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._inlined, url)

    def _inlined(self, url: str) -> str:
        return "data:;base64," + base64.b64encode(self.fetch(url)).decode()

    def close(self) -> None:
        """Fetch nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def fetch(self, url: str) -> bytes:
        """Return an image's file; blocks meanwhile. Refused says why there is none."""
        deadline = time.monotonic() + FETCH_TIMEOUT
        for _ in range(REDIRECTS + 1):
            found = self._get(url, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise Refused(f"it was redirected more than {REDIRECTS} times")

    def _get(self, url: str, deadline: float) -> bytes | str:
        """Return the file at a URL, or where it redirects to."""
        try:
            connection, path = self._connection(url)
        except ValueError as error:
            raise Refused(f"the URL is not valid: {error}") from error
        connection.timeout = _left(deadline)
        # A server that sends a byte now and then never times out by itself.
        watch = threading.Timer(_left(deadline), connection.abort)
        watch.start()
        try:
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "canvasrt"}
            connection.request("GET", path, headers=headers)
            reply = connection.getresponse()
            if reply.status in (301, 302, 303, 307, 308) and reply.getheader("Location"):
                return str(reply.getheader("Location"))
            if reply.status != 200:
                raise Refused(f"its server answered with status {reply.status}")
            return _body(reply, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"it cannot be fetched: {error or type(error).__name__}") from error
        finally:
            watch.cancel()
            connection.close()

    def _connection(self, url: str) -> tuple[_Pinned, str]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused("it is neither http nor https")
        if parts.username is not None or parts.password is not None:
            raise Refused("its URL has credentials")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = self._checked(parts.hostname, port)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not path.isascii() or any(character <= " " for character in path):
            raise Refused("its URL has characters that must be escaped")
        kind = _PinnedTLS if parts.scheme == "https" else _Pinned
        return kind(parts.hostname, port, address), path

    def _checked(self, host: str, port: int) -> str:
        """Return an address of a host, all of whose addresses are allowed."""
        try:
            addresses = self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise Refused(f"{host} cannot be resolved") from error
        if not addresses or not all(self._allowed(each) for each in addresses):
            raise Refused(f"{host} is not a public address")
        return addresses[0]


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the host's name resolves to now."""

    def __init__(self, host: str, port: int, address: str) -> None:
        super().__init__(host, port)
        self._address = address
        self._open: socket.socket | None = None

    def connect(self) -> None:
        self.sock: Any = socket.create_connection((self._address, self.port), self.timeout)
        self._open = self.sock

    def abort(self) -> None:
        """End the connection from another thread; what waits for it fails."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.shutdown(socket.SHUT_RDWR)


class _PinnedTLS(_Pinned):
    """The same, whose certificate must be for the host's name."""

    default_port = 443

    def connect(self) -> None:
        super().connect()
        context = ssl.create_default_context()
        self.sock = self._open = context.wrap_socket(self.sock, server_hostname=self.host)


def _body(reply: http.client.HTTPResponse, deadline: float) -> bytes:
    data = bytearray()
    while chunk := reply.read1(1 << 16):
        data += chunk
        if len(data) > MAX_IMAGE_BYTES:
            raise Refused(f"it is larger than {MAX_IMAGE_BYTES // 2**20} MiB")
    _left(deadline)  # an aborted connection ends like a whole one
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Refused(f"it takes longer than {FETCH_TIMEOUT:g} seconds")
    return left


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


async def inline(messages: list[dict[str, Any]], fetcher: Fetcher) -> int:
    """Replace the remote images of a chat with data URLs, and return how many characters these have.
    ApiError names one that is not fetched."""
    found = [
        (f"messages[{i}].content[{j}].image_url.url", part["image_url"])
        for i, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
        if isinstance(part, dict) and _remote(part.get("image_url"))
    ]
    if len(found) > MAX_REMOTE_IMAGES:
        raise bad_request(
            f"The request has {len(found)} remote images; at most {MAX_REMOTE_IMAGES} are fetched.",
            "messages",
            "invalid_value",
        )
    sizes = await asyncio.gather(*(_inline(image, where, fetcher) for where, image in found))
    return sum(sizes)


async def _inline(image: dict[str, Any], where: str, fetcher: Fetcher) -> int:
    try:
        url = await fetcher.fetched(image["url"])
    except Refused as error:
        raise _refusal(where, error) from error
    image["url"] = url
    return len(url)


def _remote(image: Any) -> bool:
    return isinstance(image, dict) and isinstance(image.get("url"), str) and is_remote(image["url"])


def _refusal(where: str, error: Refused) -> ApiError:
    return bad_request(
        f"The image of {where} is not available: {error}.", where, "invalid_image_url"
    )
