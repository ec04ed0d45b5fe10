"""TLS below connections that have their places before their handshakes."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping
from typing import Any

from canvasrt.containers.openai.connections import Connection

_GOODBYE = 5.0  # seconds for a caller to confirm that its connection ends


class Handshake(SSLProtocol):
    """TLS below one connection. Only its connection bounds the time of its handshake."""

    # Bytes that one read may take, which every connection sets aside. asyncio's own 256 KiB are six times what the rest
    # of a pending handshake needs.
    max_size = 32 * 1024

    def __init__(self, connection: Connection, context: ssl.SSLContext) -> None:
        nobody: Any = None  # waits for the handshake
        super().__init__(
            connection.loop,
            connection,
            context,
            nobody,
            server_side=True,
            ssl_shutdown_timeout=_GOODBYE,
        )
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place, and begin the handshake."""
        self._connection.enter(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the place back, also of a connection whose handshake has failed."""
        self._connection.leave()
        super().connection_lost(exc)


def server_context(files: Mapping[str, str]) -> ssl.SSLContext:
    """Return the settings of a server with a `certificate` and a `key`, and with the `ca` that
    callers' certificates must come from, if there is one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files["certificate"], files["key"])
    if files.get("ca"):
        context.load_verify_locations(files["ca"])
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def below(protocol: type[Connection], context: ssl.SSLContext) -> Any:
    """Return a protocol for uvicorn: `protocol` over TLS."""

    def made(**given: Any) -> Handshake:
        return Handshake(protocol(**given), context)

    return made
