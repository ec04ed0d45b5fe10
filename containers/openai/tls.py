"""The front end's TLS settings."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping

from canvasrt.containers.openai.connections import Places

log = logging.getLogger(__name__)

_LOOK_EVERY = 60.0  # seconds
# The size of each connection's read buffer, in bytes. asyncio's default, 256 KiB, is six times as much memory as
# everything else that a pending handshake needs.
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


async def renew(places: Places, files: Mapping[str, str]) -> None:
    """Give new connections a new context whenever the files change, because certificates expire."""
    known = _stamps(files)
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        try:
            if (now := _stamps(files)) == known:
                continue
            places.tls = server_context(files)
        except OSError as error:  # also ssl.SSLError
            log.warning("the changed TLS files cannot be used, so the former ones stay: %s", error)
            continue
        known = now
        log.info("the TLS files have changed: new connections use them")


def _stamps(files: Mapping[str, str]) -> list[tuple[int, int]]:
    return [(found.st_ino, found.st_mtime_ns) for found in map(os.stat, files.values())]
