"""The front end's TLS settings."""

from __future__ import annotations

import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping

# Bytes of every connection's read buffer. asyncio's default, 256 KiB, is six times as much memory as everything else
# that a pending handshake needs.
SSLProtocol.max_size = 32 * 1024


def server_context(files: Mapping[str, str]) -> ssl.SSLContext:
    """Return a server's TLS context for the files `certificate` and `key`. If there is a file `ca`, callers need a
    certificate that the authority in `ca` signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files["certificate"], files["key"])
    if files.get("ca"):
        context.load_verify_locations(files["ca"])
        context.verify_mode = ssl.CERT_REQUIRED
    return context
