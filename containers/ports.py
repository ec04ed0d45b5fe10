"""The ports of a server, checked before it starts."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, fields

from canvasrt.errors import CanvasError

API_PORT = 8000  # of the OpenAI front end, as in NIM


@dataclass(frozen=True)
class Ports:
    """Where Triton listens. The defaults are those of the NIM containers that wrap Triton."""

    http: int = 8080
    grpc: int = 8001
    metrics: int = 8002

    def resolve(self, host: str) -> Ports:
        """The same ports, with a free one for every 0. CanvasError for one that cannot be used."""
        held: dict[str, socket.socket] = {}
        try:
            # Held until all are known, so that no two get the same free port.
            for field in fields(self):
                option = f"--{field.name}-port"
                held[field.name] = listen(host, getattr(self, field.name), option)
            return Ports(**{name: each.getsockname()[1] for name, each in held.items()})
        finally:
            for each in held.values():
                each.close()


def listen(host: str, port: int, option: str, backlog: int = 1) -> socket.socket:
    """A listening socket; port 0 takes a free one. CanvasError names the option that is to blame."""
    if not 0 <= port <= 65535:
        raise CanvasError(f"{option} is {port}", "give a port from 1 to 65535, or 0 for a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, option, error) from error
    return listener


def _refusal(host: str, port: int, option: str, error: OSError) -> CanvasError:
    if error.errno == errno.EADDRINUSE:
        return CanvasError(
            f"port {port} on {host} is in use",
            f"stop what listens there, or give another port with {option} (0 takes a free one)",
        )
    if error.errno in (errno.EADDRNOTAVAIL, None) or isinstance(error, socket.gaierror):
        return CanvasError(
            f"{host} is not an address of this machine", "give --host 127.0.0.1, or 0.0.0.0 for all"
        )
    return CanvasError(
        f"port {port} on {host} cannot be used: {error.strerror}",
        f"give another port with {option}",
    )
