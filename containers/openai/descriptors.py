"""Raises the process's limit on file descriptors, and logs rarely when the limit is reached."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from canvasrt.containers.logs import Seldom

log = logging.getLogger(__name__)

# Descriptors reserved for everything else, such as accepted connections that are not counted yet.
_SPARE = 512
# asyncio's message when it cannot accept a connection; it then waits a second.
_NO_MORE = "socket.accept() out of system resource"


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the hard limit, and return it. A connection takes one descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def affordable(connections: int, files: int, guards: bool = False) -> int:
    """Return `connections` per port, reduced to what a process with `files` descriptors can serve. With `guards` it also serves
    Triton's HTTP port, where a connection takes a second file towards Triton."""
    most = max(files - _SPARE, files // 2) // (3 if guards else 1)
    if connections > most:
        log.warning(
            "%d connections are allowed, not %d: a process may open %d files (ulimit -Hn)",
            most,
            connections,
            files,
        )
    return min(connections, most)


def report_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """Log once a minute that no connection can be accepted; asyncio logs it thousands of times a
    second."""
    seldom = Seldom(log, logging.ERROR)

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] == _NO_MORE:
            error = context["exception"]
            seldom.note(_NO_MORE, f"cannot accept connections: {error.strerror}")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)
