"""Ports and addresses of servers, checked before they are used."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import ClassVar
from urllib.parse import urlsplit

from canvasrt.containers.names import GRPC_PORT, HTTP_PORT, METRICS_PORT
from canvasrt.errors import CanvasError, UsageError
from canvasrt.option import port_option

BACKLOG = 1024  # maximum number of connections that wait in the kernel
# Address that means all interfaces → loopback address at which to call the server.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@dataclass(frozen=True)
class Ports:
    """Triton's ports. 0 selects a free port."""

    SUFFIX: ClassVar[str] = "_port"  # suffix of the options' names

    http: int = field(
        default=HTTP_PORT, metadata=port_option("Port of Triton's HTTP API; 0 takes a free one.")
    )
    grpc: int = field(
        default=GRPC_PORT, metadata=port_option("Port of Triton's gRPC API; 0 takes a free one.")
    )
    metrics: int = field(
        default=METRICS_PORT, metadata=port_option("Port of Triton's metrics; 0 takes a free one.")
    )

    def requests(self, host: str, metrics_host: str | None = None) -> list[PortRequest]:
        """Return the ports that the options ask for."""
        return [
            PortRequest(
                f"--{each.name}-port",
                metrics_host or host if each.name == "metrics" else host,
                getattr(self, each.name),
            )
            for each in fields(self)
        ]

    @contextlib.contextmanager
    def held(
        self, host: str, metrics_host: str | None = None, apis: bool = True
    ) -> Iterator[Ports]:
        """Keep the ports reserved inside the `with` block. Yields them with every 0 replaced by a free port. Raises
        CanvasError for a port that cannot be used.

        A socket that is bound but does not listen reserves a port. Other processes cannot take the port, but Triton can
        listen on it, because Triton's sockets have SO_REUSEADDR. Without `apis`, only the metrics
        port is reserved, because another process listens on the HTTP and gRPC ports.
        """
        asked = self.requests(host, metrics_host)
        check_distinct(asked)
        with contextlib.ExitStack() as stack:
            numbers = [] if apis else [self.http, self.grpc]
            for each in asked[len(numbers) :]:
                bound = stack.enter_context(bind(each.host, each.port, each.option))
                numbers.append(bound.getsockname()[1])
            yield Ports(*numbers)


@dataclass(frozen=True)
class PortRequest:
    """A port that an option asks for."""

    option: str
    host: str
    port: int


def check_distinct(asked: Sequence[PortRequest]) -> None:
    """Raise UsageError if two options ask for the same port of the same address."""
    for first, second in combinations(asked, 2):
        hosts = {first.host, second.host}
        if first.port == second.port != 0 and (len(hosts) == 1 or hosts & set(_EVERY)):
            raise UsageError(
                f"{first.option} and {second.option} are both {first.port}",
                f"give {second.option} another port (0 takes a free one)",
            )


def listen(host: str, port: int, option: str, backlog: int = 1) -> socket.socket:
    """Return a listening socket; port 0 selects a free port. If the port cannot be used, raises CanvasError, which
    names `option`."""
    listener = bind(host, port, option)
    try:
        listener.listen(backlog)
    except OSError as error:  # another process has reserved the port
        listener.close()
        raise _refusal(host, port, option, error) from error
    return listener


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a socket bound to a port; port 0 selects a free port. If the port cannot be used, raises CanvasError,
    which names `option`."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{option} is {port}", "give a port from 1 to 65535, or 0 for a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _refusal(host, port, option, error) from error
    return bound


def callable_host(host: str) -> str:
    """Return the address at which to call a server that listens on `host`: loopback for all interfaces."""
    return _EVERY.get(host, host)


def url_host(host: str) -> str:
    """Return the address of `callable_host` as part of a URL."""
    found = callable_host(host)
    return f"[{found}]" if ":" in found else found


def split_url(url: str, schemes: Sequence[str], hint: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of `--url`. The default scheme is the first of `schemes`. Raises UsageError for an
    invalid URL."""
    try:
        parts = urlsplit(url if "://" in url else f"{schemes[0]}://{url}")
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--url {url} is not an address: {error}", hint) from None
    if not parts.hostname:
        raise UsageError(f"--url {url} has no host", hint)
    if parts.scheme not in schemes:
        raise UsageError(f"--url {url} has the unsupported scheme {parts.scheme}", hint)
    return parts.scheme, parts.hostname, port


def _refusal(host: str, port: int, option: str, error: OSError) -> CanvasError:
    if error.errno == errno.EADDRINUSE:
        return CanvasError(
            f"port {port} on {host} is in use",
            f"stop the program that uses it, or give another port with {option} (0 takes a free one)",
        )
    if error.errno in (errno.EADDRNOTAVAIL, None) or isinstance(error, socket.gaierror):
        return CanvasError(
            f"{host} is not an address of this machine",
            "give 127.0.0.1, or 0.0.0.0 for all of its addresses",
        )
    return CanvasError(
        f"port {port} on {host} cannot be used: {error.strerror}",
        f"give another port with {option}",
    )
