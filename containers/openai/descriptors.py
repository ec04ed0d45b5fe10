"""File descriptors: how many this process may open, and what happens when there are none left."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from canvasrt.containers.logs import Seldom

log = logging.getLogger(__name__)

# Files for everything else, such as connections that are accepted and not counted yet.
_SPARE = 512
# What asyncio says when it cannot accept a connection; then it waits a second.
_NO_MORE = "socket.accept() out of system resource"


def raise_file_limit() -> int:
    """Let this process open as many files as it may, and return how many that are: each connection
    is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def affordable(connections: int, files: int) -> int:
    """Return how many of so many connections to allow where a process may open so many files."""
    most = max(files - _SPARE, files // 2)
    if connections > most:
        log.warning(
            "%d connections are allowed, not %d: a process may open %d files (ulimit -Hn)",
            most,
            connections,
            files,
        )
    return min(connections, most)


def report_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """Log that no connection can be accepted once a minute: asyncio says it thousands of times a
    second."""
    seldom = Seldom(log, logging.ERROR)

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] == _NO_MORE:
            error = context["exception"]
            seldom.note(_NO_MORE, f"cannot accept connections: {error.strerror}")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)
