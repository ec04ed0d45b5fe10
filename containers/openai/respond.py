"""Answers `/v1/responses`, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.completions import Completions, Run, streamed
from canvasrt.containers.openai.disconnect import unless_disconnected
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.response_events import ResponseBuilder
from canvasrt.containers.openai.responses import ResponsesRequest, as_chat, renamed
from canvasrt.errors import CanvasError


async def respond(completions: Completions, request: Request, body: ResponsesRequest) -> Response:
    """Return the reply to one request. ApiError, or Disconnected once the caller has left."""
    try:
        size = len(await request.body())
        chat = await completions.aside.run(size, as_chat, body)
        run = await completions.start(request, chat)
    except ApiError as error:
        raise renamed(error) from error
    builder = ResponseBuilder(body, run.seed)
    if body.stream:
        return await streamed(request, _events(run, builder))
    return JSONResponse(await unless_disconnected(request.receive, _whole(run, builder)))


async def _whole(run: Run, builder: ResponseBuilder) -> dict[str, Any]:
    final: StreamEvent | None = None
    try:
        async with run.answers() as answers:
            async for number, event in answers:
                if event.event == "final":
                    final = event
                    run.count(number, event)
    except (ApiError, CanvasError) as error:
        raise renamed(run.named(error)) from error
    assert final is not None
    builder.add(run.reader().put(final.text, final=True))
    response: dict[str, Any] = builder.end(final)[-1]["response"]
    return response


async def _events(run: Run, builder: ResponseBuilder) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events. ApiError only before the first."""
    reader, begun = run.reader(), False
    try:
        async with run.answers() as answers:
            async for number, event in answers:
                events = []
                if not begun:
                    begun = True
                    run.first_piece()
                    events = builder.begin()
                if event.event == "final":
                    run.count(number, event)
                    events += builder.add(reader.put("", final=True)) + builder.end(event)
                else:
                    events += builder.add(reader.put(event.text))
                for each in events:
                    yield _line(each)
    except (ApiError, CanvasError) as error:
        failure = renamed(run.named(error))
        if not begun:
            raise failure from error
        for each in builder.failed(failure):
            yield _line(each)


def _line(event: dict[str, Any]) -> bytes:
    data = json.dumps(event, ensure_ascii=False)
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
