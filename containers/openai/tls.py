"""The front end's TLS."""

from __future__ import annotations

import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping

# Bytes of every connection's read buffer. asyncio's default of 256 KiB is six times the rest of a pending handshake's
# memory.
SSLProtocol.max_size = 32 * 1024


def server_context(files: Mapping[str, str]) -> ssl.SSLContext:
    """Return a server's TLS context with `certificate` and `key`. With `ca`, callers need a certificate that it
    signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files["certificate"], files["key"])
    if files.get("ca"):
        context.load_verify_locations(files["ca"])
        context.verify_mode = ssl.CERT_REQUIRED
    return context
