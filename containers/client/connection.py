"""HTTP connections of the clients and of the server's health checks."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from pathlib import Path


def connection(
    secure: bool, host: str, port: int | None, timeout: float
) -> http.client.HTTPConnection:
    """Return a connection that the first request opens. SSL_CERT_FILE can name a private certificate authority."""
    if not secure:
        return http.client.HTTPConnection(host, port or 80, timeout=timeout)
    context = ssl.create_default_context()
    return http.client.HTTPSConnection(host, port or 443, timeout=timeout, context=context)


def error_message(body: bytes) -> str:
    """Return the message of an error reply in OpenAI's form; empty for any other reply."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def fetch(host: str, port: int, path: str, timeout: float, unix: Path | None = None) -> bytes:
    """Return the body of a page; empty if the request fails or the status is not 200. `timeout` is in seconds. If
    `unix` is set, connect to that Unix socket."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        if unix is not None:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(timeout)
            connection.sock.connect(str(unix))
        connection.request("GET", path)
        reply = connection.getresponse()
        # An empty body must not look like a failure.
        return reply.read() or b"\n" if reply.status == 200 else b""
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()
