"""Notices callers that disconnect, so that their requests are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


class EventStream(Response):
    """Sends server-sent events as they come; when the caller disconnects, `events` is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        # Otherwise proxies would wait for the whole answer.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        await unless_disconnected(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
