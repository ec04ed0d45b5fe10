"""Declares the API operations that call the model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from canvasrt.containers.openai.body import Body
from canvasrt.containers.openai.errors import ApiError, ErrorReply
from canvasrt.containers.openai.generation import Generation, Reply

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
    # Replaces field names in an error with those that the caller used.
    renamed: Callable[[ApiError], ApiError] = lambda error: error
    error: Any = ErrorReply  # the type of an error


Answer = Callable[[Endpoint, Request], Coroutine[Any, Any, Response]]


class _Route(APIRoute):
    """A route whose body FastAPI documents but does not read. The endpoint reads the body, within limits, and parses
    long bodies off the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return partial(self.endpoint, body=None)


def add_endpoint(app: FastAPI, endpoint: Endpoint, answer: Answer) -> None:
    """Add an operation's route and its description."""

    async def operation(request: Request, body: Any) -> Response:
        try:
            return await answer(endpoint, request)
        except ApiError as error:
            return error.response(endpoint.path)

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
