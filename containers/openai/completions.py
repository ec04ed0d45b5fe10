"""The two endpoints that generate text."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.aside import Aside
from canvasrt.containers.openai.disconnect import unless_disconnected
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.event_stream import EventStream
from canvasrt.containers.openai.inputs import RequestLimits, triton_inputs
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.middleware import MORE, parameters_of
from canvasrt.containers.openai.remote import Fetcher, inline
from canvasrt.containers.openai.replies import ReplyShape
from canvasrt.containers.openai.response_formats import named_format
from canvasrt.containers.openai.schema import ChatRequest, CompletionRequest
from canvasrt.containers.openai.tools import reader_of
from canvasrt.containers.openai.upstream import Answers, Upstream
from canvasrt.errors import CanvasError

log = logging.getLogger(__name__)

Body = ChatRequest | CompletionRequest
# Names that the model's errors use for the prompt.
_PROMPTS = ("prompt", "prompt_ids", "messages", "message", "chat", "template", "prefix")


class Completions:
    """Answers requests through one upstream."""

    def __init__(
        self,
        upstream: Upstream,
        metrics: FrontMetrics,
        fingerprint: str,
        limits: RequestLimits,
        aside: Aside,
        fetcher: Fetcher | None = None,
    ) -> None:
        """Without a `fetcher`, remote images are refused."""
        self.aside = aside
        self._limits = limits
        self._fetcher = fetcher
        self._upstream = upstream
        self._metrics = metrics
        self._fingerprint = fingerprint

    async def reply(self, request: Request, body: Body) -> Response:
        """Return the answer to one request. ApiError, or Disconnected once the caller has left."""
        run = await self.start(request, body)
        if not body.stream:
            answer = await unless_disconnected(request.receive, run.whole())
            return JSONResponse(answer)
        events = run.events()
        return await streamed(request, events)

    async def start(self, request: Request, body: Body) -> Run:
        """Return one request, ready to be sent. ApiError for what is wrong with it."""
        size = len(await request.body())
        if isinstance(body, ChatRequest) and self._fetcher is not None:
            size += await inline(body.messages, self._fetcher)
        inputs = await self.aside.run(size, triton_inputs, body, self._limits)
        request.scope[MORE](len(inputs) - 1)
        chat = isinstance(body, ChatRequest)
        seed = inputs[0]["seed"]
        shape = ReplyShape(
            chat, body.model, self._fingerprint, seed, body.ignored, body.wants_usage
        )
        if isinstance(body, ChatRequest):
            shape.reader = reader_of(body)
        return Run(self, body, inputs, shape, request.url.path, parameters_of(request))

    def answers(self, inputs: list[dict[str, Any]], parameters: Mapping[str, int | str]) -> Answers:
        """Return the answers to a caller's requests that Triton has yet to get."""
        return Answers(self._upstream, inputs, parameters)


class Run:
    """One request, while Triton answers it."""

    def __init__(
        self,
        owner: Completions,
        body: Body,
        inputs: list[dict[str, Any]],
        shape: ReplyShape,
        endpoint: str,
        parameters: Mapping[str, int | str],
    ) -> None:
        self._parameters = parameters
        self._owner = owner
        self._body = body
        self._inputs = inputs
        self._shape = shape
        self.seed = shape.seed
        self.reader = shape.reader
        self._endpoint = endpoint
        self._begin = time.perf_counter()

    def answers(self) -> Answers:
        """Return the answers, which iterating over them asks for."""
        return self._owner.answers(self._inputs, self._parameters)

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        finals: dict[int, StreamEvent] = {}
        try:
            async with self.answers() as answers:
                async for number, event in answers:
                    if event.event == "final":
                        finals[number] = event
                        self.count(number, event)
        except (ApiError, CanvasError) as error:
            raise self.named(error) from error
        return self._shape.whole([finals[number] for number in range(len(self._inputs))])

    async def events(self) -> AsyncIterator[bytes]:
        """Yield a streamed answer as server-sent events. ApiError only before the first."""
        shape, open_choices = self._shape, set()
        begun = False
        try:
            async with self.answers() as answers:
                async for number, event in answers:
                    begun = True
                    if event.event == "draft":
                        yield _event(shape.draft(number, event))
                        continue
                    if number not in open_choices:
                        open_choices.add(number)
                        self.first_piece()
                        if (opening := shape.opening(number)) is not None:
                            yield _event(opening)
                    if event.event == "final":
                        self.count(number, event)
                        chunks = shape.closing(number, event)
                    else:
                        chunks = shape.pieces(number, event)
                    for chunk in chunks:
                        yield _event(chunk)
        except (ApiError, CanvasError) as error:
            failure = self.named(error)
            if not begun:
                raise failure from error
            yield _event(failure.to_json())
            return
        if shape.with_usage:
            yield _event(shape.usage_chunk())
        yield b"data: [DONE]\n\n"

    def count(self, number: int, final: StreamEvent) -> None:
        """Add a finished answer to the usage and the metrics."""
        metrics = self._owner._metrics
        prompt, index = divmod(number, self._body.n or 1)
        first = index == 0
        self._shape.usage.add(final, prompt, first_of_prompt=first)
        metrics.tokens["prompt"] += len(final.prompt_token_ids) if first else 0
        metrics.tokens["completion"] += len(final.token_ids)
        metrics.steps += sum(final.steps)

    def first_piece(self) -> None:
        """Measure the time to an answer's first text."""
        seconds = time.perf_counter() - self._begin
        self._owner._metrics.first[self._endpoint].add(seconds)

    def named(self, error: ApiError | CanvasError) -> ApiError:
        """Return the error, with the caller's name for the parameter that is wrong."""
        if isinstance(error, CanvasError):  # a value that does not fit its tensor
            error = ApiError(400, f"{error.message}: {error.hint}.", code="invalid_value")
        if error.status != 400:
            return error
        chat = isinstance(self._body, ChatRequest)
        field = (error.param or "").partition(".")[0]
        budget = self._body.token_budget[0]
        if error.param == "max_new_tokens":
            error.param = budget
            error.message = error.message.replace("max_new_tokens", budget)
        elif field == "grammar":
            named = named_format(error.param or "")
            if "tool_calls" in str(self._inputs[0].get("grammar", ""))[:24]:
                named = "tools"
            error.message = error.message.replace(error.param or "", named, 1)
            error.param = named
        elif field not in type(self._body).model_fields or field in _PROMPTS:
            error.param = "messages" if chat else "prompt"
        return error


async def streamed(
    request: Request, events: AsyncIterator[bytes], kind: type[EventStream] = EventStream
) -> Response:
    """Return a streamed reply. Until the first event, an error still has its own status."""
    first = await unless_disconnected(request.receive, _first(events))
    return kind(_resumed(first, events))


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _resumed(first: bytes, events: Any) -> AsyncIterator[bytes]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(events.aclose)
        yield first
        async for event in events:
            yield event


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
