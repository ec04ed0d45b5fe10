"""If a caller leaves a stream, work on the request ends, and no error is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from canvasrt.containers.openai import streaming
from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.middleware import DISCONNECTED, Middleware
from canvasrt.containers.openai.streaming import kept_alive, streamed


class _Kept(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.emit = records.append  # type: ignore[method-assign]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_s_caller_who_leaves_is_no_error(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [_Kept(records)])
    monkeypatch.setattr(root, "level", logging.INFO)
    app, closed, sent = FastAPI(), asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            if leaves:
                await asyncio.Event().wait()
        finally:
            closed.set()

    @app.post("/stream")
    async def stream(request: Request) -> Response:
        return await streamed(request.receive, chunks(), "text/event-stream")

    async def receive() -> dict[str, Any]:
        await (sent if leaves else asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body") == b"first":
            sent.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/stream",
        "headers": [],
        "query_string": b"",
    }
    metrics = FrontMetrics()
    asyncio.run(Middleware(app, ServerState(), metrics, 100)(scope, receive, send))
    assert closed.is_set()
    status = DISCONNECTED if leaves else 200
    assert [
        each.getMessage().split()[:3] for each in records if each.name.startswith("canvasrt")
    ] == [["POST", "/stream", str(status)]]
    assert dict(metrics.requests) == {("/stream", status): 1}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("silence", [0.01, 60])
def test_a_silent_stream_sends_comments(
    silence: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_SILENCE", silence)

    async def read() -> list[bytes]:
        found: list[bytes] = []

        async def chunks() -> AsyncGenerator[bytes, None]:
            while silence < 1 and not found:
                await asyncio.sleep(silence)
            if fails:
                raise bad_request("no")
            yield b"first"
            yield b"last"

        async for each in kept_alive(chunks(), lambda error: error.message.encode()):
            found.append(each)
        return found

    if fails and silence == 60:  # nothing is sent yet, so the error sets the status
        with pytest.raises(ApiError, match="no"):
            asyncio.run(read())
        return
    found = asyncio.run(asyncio.wait_for(read(), 60))
    comments = [each for each in found if each.startswith(b":")]
    assert bool(comments) == (silence < 1)
    assert found == [*comments, *([b"no"] if fails else [b"first", b"last"])]
