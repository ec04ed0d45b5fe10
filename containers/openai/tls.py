"""The front end's TLS."""

from __future__ import annotations

import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping

# Bytes of a read buffer, which every connection allocates. asyncio's default of 256 KiB is six times as large as the rest of a
# pending handshake.
SSLProtocol.max_size = 32 * 1024


def server_context(files: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context of a server with `certificate` and `key`. If there is a `ca`, callers'
    certificates must come from it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files["certificate"], files["key"])
    if files.get("ca"):
        context.load_verify_locations(files["ca"])
        context.verify_mode = ssl.CERT_REQUIRED
    return context
