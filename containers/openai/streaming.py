"""Sends streamed replies, and cancels work when its caller disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from canvasrt.containers.openai.errors import ApiError

log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")
# Seconds of silence after which a stream sends a comment. Proxies close connections that are silent for a minute.
_SILENCE = 30.0
_COMMENT = b": still working\n\n"


class Disconnected(Exception):
    """The caller has closed its connection."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ReplyT]) -> ReplyT:
    """Return the result of `work`. If the caller disconnects first, cancel `work` and raise Disconnected.

    The request's body must already have been read.
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


async def kept_alive(
    chunks: AsyncGenerator[bytes, None], failed: Callable[[ApiError], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of an event stream, and a comment after every `_SILENCE` seconds without a chunk. After a
    comment, an error can no longer set the HTTP status, so it becomes the chunk that `failed` returns."""
    begun = False
    async with aclosing(chunks):
        while True:
            following = asyncio.ensure_future(anext(chunks, None))
            try:
                while not (await asyncio.wait((following,), timeout=_SILENCE))[0]:
                    begun = True
                    yield _COMMENT
                chunk = following.result()
            except ApiError as error:
                if not begun:
                    raise
                log.info("a stream failed after a comment: %d %s", error.status, error.message)
                chunk = failed(error)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
            if chunk is None:
                return
            yield chunk


async def streamed(
    receive: Receive, chunks: AsyncGenerator[bytes, None], media_type: str
) -> Response:
    """Return a streamed reply. Waits for the first chunk, so that an earlier error can set the HTTP status."""
    first = await unless_disconnected(receive, anext(chunks))  # type: ignore[arg-type]
    return _Stream(first, chunks, media_type)


class _Stream(Response):
    """Sends chunks as they come, and closes their generator when the caller disconnects."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], media_type: str) -> None:
        # Without these headers, proxies would buffer the whole answer.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # The response has started, so no error can be sent. The access log records that the response did not end.
            with suppress(Disconnected):
                await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for chunk in self._rest:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
