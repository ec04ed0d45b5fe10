"""Notices callers that disconnect, so that their requests are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ReplyT = TypeVar("ReplyT")


class Disconnected(Exception):
    """The caller has closed its connection."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ReplyT]) -> ReplyT:
    """Return the result of `work`. When the caller disconnects, cancel it and raise Disconnected.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    end = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for each in (task, end):
            each.cancel()
        await asyncio.gather(task, end, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
