"""Raises the process's limit on file descriptors, and keeps asyncio from flooding the log at that limit."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from canvasrt.containers.logs import Seldom

log = logging.getLogger(__name__)

# Descriptors kept for other uses than counted connections, such as connections accepted but not counted yet.
_SPARE = 512
# asyncio's message when it cannot accept a connection. asyncio then waits a second.
_NO_MORE = "socket.accept() out of system resource"


def raise_file_limit() -> int:
    """Raise this process's limit on file descriptors to the hard limit, and return the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def affordable(connections: int, files: int, guards: bool = False) -> int:
    """Return how many connections a port may have: `connections`, or fewer if `files` descriptors do not suffice.

    A connection takes one descriptor. If `guards`, Triton's HTTP port may have the same number of connections, each of
    which takes two descriptors.
    """
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
    """Log at most once a minute that no connection can be accepted. asyncio would log thousands of lines a second."""
    seldom = Seldom(log, logging.ERROR)

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] == _NO_MORE:
            error = context["exception"]
            seldom.note(_NO_MORE, f"cannot accept connections: {error.strerror}")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)
