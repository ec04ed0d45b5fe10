"""Declares the API operations that call the model, and runs their requests."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.body import Body
from canvasrt.containers.openai.body_pool import BodyPool
from canvasrt.containers.openai.errors import ApiError, ErrorReply, bad_request, rename
from canvasrt.containers.openai.generation import Answer, Generation, Reply, Served
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.parse_answer import AnswerParser, PlainText
from canvasrt.containers.openai.tracing import Blocks
from canvasrt.containers.openai.upstream import Source, events_of
from canvasrt.errors import CanvasError

# The errors that operations can return. A server returns 503 while it starts or stops.
_ABOUT = {
    400: "The request is wrong, or asks for something that is not supported.",
    401: "The API key is missing or wrong.",
    403: "The Host is not one of this server's.",
    404: "The model is not served here.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    429: "A limit of the operator is reached; try again later.",
    500: "The model failed.",
    503: "The server cannot answer now; try again later.",
    504: "The request took longer than the operator allows.",
}


def errors(*statuses: int, body: Any = ErrorReply) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of errors, keyed by status. Without `statuses`, all errors are described."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    # FastAPI compiles a validator for each response that has a model. So only one response has the model, which defines
    # the schema; the other responses refer to that schema.
    return {
        each: {
            "description": _ABOUT[each],
            **({"model": body} if each == 400 else {"content": content}),
        }
        for each in statuses or _ABOUT
    }


@dataclass(frozen=True)
class Endpoint:
    """One API operation. To add one, write a module that defines its body, `parse`, reply and `Endpoint`, and list the
    `Endpoint` in `app.ENDPOINTS`."""

    path: str
    about: str
    body: type[Body]
    parse: Callable[[Any], Generation]
    reply: type[Reply]
    answer: Any  # the type of a reply that is not streamed, for the OpenAPI document
    streams: bool = False
    # Patterns of our parameter names → the names in this API, for errors.
    names: Mapping[str, str] = field(default_factory=dict)
    error: Any = ErrorReply  # the type of an error

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Inside the `with` block, errors get this API's parameter names."""
        try:
            yield
        except ApiError as error:
            rename(error, self.names)
            raise


class Run:
    """One request while the model answers it."""

    def __init__(
        self,
        endpoint: Endpoint,
        body: Body,
        asked: Generation,
        inputs: list[dict[str, Any]],
        served: Served,
        upstream: Source,
        metrics: FrontMetrics,
        parameters: Mapping[str, int | str],
    ) -> None:
        """`inputs` holds the model's inputs, one mapping per answer. `parameters` accompany every request to the
        model."""
        self._begin = time.perf_counter()
        self._answers = events_of(upstream, inputs, parameters)
        self._count = len(inputs)
        self._metrics, self._asked, self._endpoint = metrics, asked, endpoint
        self._blocks = Blocks()
        self.reply = endpoint.reply(body, asked, inputs[0]["seed"] if inputs else 0, served)

    async def answers(self) -> list[Answer]:
        """Return all answers. Raises ApiError if the request fails."""
        finals: dict[int, StreamEvent] = {}
        async with aclosing(self._events()) as events:
            async for index, event in events:
                if event.event == "final":
                    finals[index] = event
        return [
            Answer(self._asked.parser().put(finals[index].text, final=True), finals[index])
            for index in range(self._count)
        ]

    async def chunks(self, pool: BodyPool) -> AsyncGenerator[bytes, None]:
        """Yield the reply as a stream. Raises ApiError only before the first chunk."""
        reply, begun = self.reply, False
        parsers: dict[int, AnswerParser | PlainText] = {}
        try:
            async with aclosing(self._events()) as events:
                async for index, event in events:
                    size, begun = len(event.logprobs), True
                    if event.event == "draft":
                        chunks = reply.draft(index, event)
                    else:
                        chunks = []
                        if index not in parsers:
                            parsers[index] = self._asked.parser()
                            seconds = time.perf_counter() - self._begin
                            self._metrics.first_piece[self._endpoint.path].add(seconds)
                            chunks += reply.open(index)
                        if event.event == "final":
                            rest = parsers[index].put("", final=True)
                            chunks += reply.close(index, Answer(rest, event))
                        else:
                            pieces = parsers[index].put(event.text)
                            chunks += await pool.run(size, reply.add, index, pieces, event)
                    for chunk in chunks:
                        yield await pool.run(size, reply.encode, chunk)
            last = reply.end()
        except ApiError as error:
            if not begun:
                raise
            last = reply.failed(error)
        for chunk in last:
            yield reply.encode(chunk)

    def failed(self, error: ApiError) -> bytes:
        """Return the last chunks of a stream that fails."""
        return b"".join(map(self.reply.encode, self.reply.failed(error)))

    async def _events(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """Yield pairs of an answer's index and an event, as events arrive. Errors have the caller's field names."""
        try:
            async with aclosing(self._answers) as events:
                async for index, event in events:
                    self._blocks.see(index, event)
                    if event.event == "final":
                        self._add_usage(index, event)
                    yield index, event
        except CanvasError as error:  # a value that its tensor cannot hold
            wrong = bad_request(f"{error.message}: {error.hint}.", None, "invalid_value")
            raise self._renamed(wrong) from error
        except ApiError as error:
            raise (self._renamed(error) if error.status == 400 else error) from None

    def _renamed(self, error: ApiError) -> ApiError:
        """Replace the model's parameter names in an error with the caller's, and return the error."""
        endpoint, text = self._endpoint, self.reply.text_field
        found = rename(error, self._asked.names)
        if not rename(error, endpoint.names) and not found:
            field = re.split(r"\W", error.param or "", maxsplit=1)[0]
            if field not in endpoint.body.model_fields or field == text:
                error.param = text
        return error

    def _add_usage(self, index: int, final: StreamEvent) -> None:
        prompt, number = divmod(index, self._asked.n)
        self.reply.usage.add(final, prompt, first_of_prompt=number == 0)
        if final.steps:  # an encode-only request has no steps
            self._metrics.add(
                len(final.prompt_token_ids) if number == 0 else 0,
                len(final.token_ids),
                sum(final.steps),
            )


Operation = Callable[[Endpoint, Request], Coroutine[Any, Any, Response]]


class _Route(APIRoute):
    """A route whose body FastAPI documents but does not read. The endpoint reads the body, within limits, and parses
    long bodies off the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return partial(self.endpoint, body=None)


def add_endpoint(app: FastAPI, endpoint: Endpoint, answer: Operation) -> None:
    """Add an operation's route and its description."""

    async def operation(request: Request, body: Any) -> Response:
        return await answer(endpoint, request)

    operation.__annotations__ = {"request": Request, "body": endpoint.body}
    responses = errors(body=endpoint.error)
    content = {endpoint.reply.media_type: {"schema": {"type": "string"}}}
    responses[200] = {"description": "The answer.", "content": content if endpoint.streams else {}}
    app.router.add_api_route(
        endpoint.path,
        operation,
        methods=["POST"],
        summary=endpoint.about,
        response_model=endpoint.answer,
        response_class=JSONResponse,
        responses=responses,
        route_class_override=_Route,
    )
