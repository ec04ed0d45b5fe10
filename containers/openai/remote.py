"""Fetches images, only from public addresses, so that requests cannot reach the server's own network."""

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin, urlsplit

from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.messages import is_remote

MAX_IMAGE_BYTES = 20 * 2**20
FETCH_TIMEOUT = 10.0  # seconds per image, including redirects
REDIRECTS = 3
MAX_REMOTE_IMAGES = 16  # per request
# Maximum bytes of one request's images (as much as callers can send inline), and of all unanswered requests' images.
MAX_REQUEST_BYTES, MAX_HELD_BYTES = 48 * 2**20, 256 * 2**20
_THREADS = 32
# Networks that do not count as public. Addresses of 6to4, Teredo and NAT64 contain an arbitrary IPv4 address.
_TUNNELS = tuple(
    ipaddress.ip_network(each)
    for each in (
        "2002::/16",
        "2001::/32",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "192.88.99.0/24",  # 6to4 relays
        "3fff::/20",  # documentation addresses, which Python 3.11 considers global
    )
)


_ISATAP = 0x5EFE  # the third 32 bits of an ISATAP address; its last 32 bits are an IPv4 address


class Refused(Exception):
    """An image cannot be fetched; the message says why."""


def is_public(address: str) -> bool:
    """Return whether an address is public. Tunnels' addresses, which can embed any IPv4 address, do not count as
    public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.is_site_local or (int(ip) >> 32) & 0xFDFFFFFF == _ISATAP:
            return False
    if any(ip in network for network in _TUNNELS):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class ImageBudget:
    """Limits the bytes of one request's images. The bytes also count in `parent`, the budget of all requests."""

    def __init__(self, most: int, parent: ImageBudget | None = None) -> None:
        self._most, self._parent, self.taken = most, parent, 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Count received bytes. Raises Refused if the limit is exceeded or the budget was given back."""
        with self._lock:
            if self.taken + size <= self._most:
                if self._parent is not None:
                    self._parent.take(size)
                self.taken += size
                return
        whose = "the images of all requests" if self._parent is None else "the request's images"
        raise Refused(f"{whose} are larger than {self._most // 2**20} MiB together")

    def give_back(self) -> None:
        """Stop counting the request's bytes. Every later `take` raises Refused."""
        with self._lock:
            self._most = -1
            if self._parent is not None:
                with self._parent._lock:
                    self._parent.taken -= self.taken
            self.taken = 0


class Fetcher:
    """Fetches images by URL, on separate threads.

    `resolve` returns a host's addresses; `allowed` returns whether a connection to an address is allowed. All of a
    host's addresses must be allowed. The connection uses one of these addresses, because a second lookup could return
    others.
    """

    def __init__(
        self,
        resolve: Callable[[str, int], list[str]] | None = None,
        allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._resolve = resolve or _addresses
        self._allowed = allowed
        self._held = ImageBudget(MAX_HELD_BYTES)
        # Separate threads, so that a slow server delays nothing else.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="canvasrt-fetch")

    @contextlib.contextmanager
    def request(self) -> Iterator[ImageBudget]:
        """Yield one request's image budget. The budget is given back at the end of the `with` block."""
        budget = ImageBudget(MAX_REQUEST_BYTES, self._held)
        try:
            yield budget
        finally:
            budget.give_back()

    async def fetched(self, url: str, budget: ImageBudget | None = None) -> str:
        """Fetch an image on a thread, without blocking, and return it as a data URL."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._inlined, url, budget
        )

    def _inlined(self, url: str, budget: ImageBudget | None) -> str:
        return "data:;base64," + base64.b64encode(self.fetch(url, budget)).decode()

    def close(self) -> None:
        """Stop fetching."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def fetch(self, url: str, budget: ImageBudget | None = None) -> bytes:
        """Return the contents of an image's file. Blocks until they have arrived. If that fails, raises Refused with
        the reason."""
        deadline = time.monotonic() + FETCH_TIMEOUT
        budget = budget or ImageBudget(MAX_REQUEST_BYTES)
        for _ in range(REDIRECTS + 1):
            found = self._get(url, deadline, budget)
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found)
            except ValueError as error:
                raise Refused(f"the URL is not valid: {error}") from error
        raise Refused(f"it was redirected more than {REDIRECTS} times")

    def _get(self, url: str, deadline: float, budget: ImageBudget) -> bytes | str:
        """Return the file at a URL, or the URL to which it redirects."""
        try:
            connection, path = self._connection(url)
        except ValueError as error:
            raise Refused(f"the URL is not valid: {error}") from error
        connection.timeout = _left(deadline)
        # A socket timeout alone would not stop a server that sends a byte now and then.
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
            return _body(reply, deadline, budget)
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
        """Return one of a host's addresses. Raises Refused if there is none, or if any of them is not allowed."""
        try:
            addresses = self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise Refused(f"{host} cannot be resolved") from error
        if not addresses or not all(self._allowed(each) for each in addresses):
            raise Refused(f"{host} is not a public address")
        return addresses[0]


class _Pinned(http.client.HTTPConnection):
    """An HTTP connection to a checked address, whatever the host's name resolves to now."""

    def __init__(self, host: str, port: int, address: str) -> None:
        super().__init__(host, port)
        self._address = address
        self._open: socket.socket | None = None

    def connect(self) -> None:
        self.sock: Any = socket.create_connection((self._address, self.port), self.timeout)
        self._open = self.sock

    def abort(self) -> None:
        """End the connection from another thread; pending reads fail."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.shutdown(socket.SHUT_RDWR)


class _PinnedTLS(_Pinned):
    """`_Pinned` over TLS. The certificate must match the host's name."""

    default_port = 443

    def connect(self) -> None:
        super().connect()
        context = ssl.create_default_context()
        self.sock = self._open = context.wrap_socket(self.sock, server_hostname=self.host)


def _body(reply: http.client.HTTPResponse, deadline: float, budget: ImageBudget) -> bytes:
    data = bytearray()
    while chunk := reply.read1(1 << 16):
        data += chunk
        budget.take(len(chunk))
        if len(data) > MAX_IMAGE_BYTES:
            raise Refused(f"it is larger than {MAX_IMAGE_BYTES // 2**20} MiB")
    # This raises if `watch` aborted the connection. To the reader, an abort looks like the end of the file.
    _left(deadline)
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Refused(f"it takes longer than {FETCH_TIMEOUT:g} seconds")
    return left


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


async def inline(
    messages: list[dict[str, Any]], fetcher: Fetcher, budget: ImageBudget | None = None
) -> int:
    """Replace a chat's remote images with data URLs, and return the total length of these URLs. Raises ApiError if an
    image cannot be fetched."""
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

    async def fetched(where: str, image: dict[str, Any]) -> int:
        try:
            image["url"] = await fetcher.fetched(image["url"], budget)
        except Refused as error:
            message = f"The image of {where} is not available: {error}."
            raise bad_request(message, where, "invalid_image_url") from error
        return len(image["url"])

    return sum(await asyncio.gather(*(fetched(*each) for each in found)))


def _remote(image: Any) -> bool:
    return isinstance(image, dict) and isinstance(image.get("url"), str) and is_remote(image["url"])
