"""The HTTP application: its operations and their shared state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.types import ASGIApp

import canvasrt
from canvasrt.containers.openai import anthropic, chunks, ollama
from canvasrt.containers.openai.about import add_management, add_models
from canvasrt.containers.openai.auth import Keys, name_of
from canvasrt.containers.openai.body import read_body
from canvasrt.containers.openai.body_pool import BodyPool
from canvasrt.containers.openai.connections import Places
from canvasrt.containers.openai.decisions import DECISIONS
from canvasrt.containers.openai.endpoint import Endpoint, Run, add_endpoint
from canvasrt.containers.openai.errors import ApiError, unavailable
from canvasrt.containers.openai.fields import Ignored
from canvasrt.containers.openai.generation import Served, answer_inputs
from canvasrt.containers.openai.health import QUIET, ServerState, add_health
from canvasrt.containers.openai.infill import INFILL
from canvasrt.containers.openai.metrics import FrontMetrics, OtherMetrics, gpu_text, triton_text
from canvasrt.containers.openai.middleware import (
    AT_END,
    CALLER,
    DISCONNECTED,
    ID,
    MORE,
    Middleware,
    internal_error,
    parameters_of,
)
from canvasrt.containers.openai.ollama_models import add_ollama_models
from canvasrt.containers.openai.options import FrontSettings
from canvasrt.containers.openai.origin import Origin, with_cors
from canvasrt.containers.openai.pages import add_pages
from canvasrt.containers.openai.remote import Fetcher, inline
from canvasrt.containers.openai.responses import RESPONSES
from canvasrt.containers.openai.streaming import (
    Disconnected,
    kept_alive,
    streamed,
    unless_disconnected,
)
from canvasrt.containers.openai.systemone import SYSTEM_ONE
from canvasrt.containers.openai.tokenize import DETOKENIZE, TOKENIZE
from canvasrt.containers.openai.tracing import telemetry
from canvasrt.containers.openai.upstream import Upstream

ENDPOINTS = (
    chunks.CHAT,
    chunks.COMPLETIONS,
    RESPONSES,
    DECISIONS,
    SYSTEM_ONE,
    INFILL,
    TOKENIZE,
    DETOKENIZE,
    anthropic.MESSAGES,
    anthropic.COUNT,
    ollama.CHAT,
    ollama.GENERATE,
)
_LONG, _LEVEL = 4096, 4  # minimum size, in bytes, of a reply to compress; gzip's level


class Front:
    """The state that all operations share, such as the connection to Triton, the API keys and the metrics."""

    def __init__(self, settings: FrontSettings, state: ServerState) -> None:
        self._settings, self._options, self._state = settings, settings.options, state
        self.metrics = FrontMetrics()
        self.keys = Keys(self._options.keys)
        about = self._options.about
        fingerprint = "fp_" + str(about.get("digest", ""))[:12]
        context, canvas = about.get("max_context"), about.get("canvas_length") or 0
        self._served = Served(self._options.max_n, context, canvas, fingerprint)
        self.pool = BodyPool()
        self._fetcher = Fetcher() if self._options.allow_remote_images else None
        self._upstream: Upstream

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Open the connection to Triton on the running event loop, and close it when the server stops."""
        settings = self._settings
        self._upstream = Upstream(settings.grpc, settings.request_timeout, settings.caller_secret)
        yield
        self.pool.close()
        await self._upstream.close()
        if self._fetcher is not None:
            self._fetcher.close()

    async def refusal(self) -> ApiError | None:
        """Return the error with which a request is refused now, or None if this process and Triton accept requests."""
        refusal = self._state.refusal()
        if refusal is None and not await self._upstream.is_ready():
            return unavailable("The model is not ready.", "model_not_ready")
        return refusal

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer one request. Raises ApiError if the request fails, and Disconnected if the caller has left."""
        self._admit(request)
        raw = await request.body()
        thinks = self._options.about.get("thinking", True)
        ignored = None if self._options.strict else Ignored(self._options.lenient, thinks)
        body = await self.pool.run(len(raw), read_body, endpoint.body, raw, ignored)
        body.check_model(self._options.names)
        with endpoint.naming():
            asked = await self.pool.run(len(raw), endpoint.parse, body)
            size = len(raw)
            if asked.messages is not None and self._fetcher is not None:
                budget = request.scope[AT_END].enter_context(self._fetcher.request())
                size += await inline(asked.messages, self._fetcher, budget)
            inputs = await self.pool.run(size, answer_inputs, asked, self._served)
        self.metrics.ignore(ignored or ())
        request.scope[MORE](max(len(inputs) - 1, 0))
        given = (self._served, self._upstream, self.metrics, parameters_of(request))
        run = Run(endpoint, body, asked, inputs, *given)
        if endpoint.streams and body.stream:
            chunks = run.chunks(self.pool)
            if endpoint.reply.media_type == "text/event-stream":
                chunks = kept_alive(chunks, run.failed)
            return await streamed(request.receive, chunks, endpoint.reply.media_type)
        answers = await unless_disconnected(request.receive, run.answers())
        size = sum(len(each.final.logprobs) + len(each.final.text) for each in answers)
        return await self.pool.run(size, lambda: JSONResponse(run.reply.whole(answers)))

    def _admit(self, request: Request) -> None:
        """Count a request against its caller's limit until its reply has ended.

        Raises ApiError if the key is missing or wrong, the caller's limit is exceeded, or the server accepts no
        requests now.
        """
        caller = self.keys.check(request.headers)
        if (refusal := self._state.refusal()) is not None:
            raise refusal
        callers = self._state.callers
        request.scope[MORE] = request.scope[AT_END].enter_context(callers.one(caller))
        request.scope[CALLER] = name_of(caller)


def make_app(settings: FrontSettings, state: ServerState, places: Places | None = None) -> ASGIApp:
    """Return the application of one server; `places` limits its connections."""
    front, options = Front(settings, state), settings.options
    app = _new_app(front)
    for endpoint in ENDPOINTS:
        add_endpoint(app, endpoint, front.answer)
    add_health(app, state, front.refusal)
    add_models(app, options, front.keys)
    add_ollama_models(app, options, front.keys, front.pool)
    add_management(
        app,
        options,
        state,
        front.metrics,
        [OtherMetrics(partial(triton_text, settings.metrics)), OtherMetrics(gpu_text)],
    )
    add_pages(app, bool(options.keys))
    app.add_middleware(
        GZipMiddleware,
        minimum_size=_LONG,
        compresslevel=_LEVEL,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/x-ndjson"),
    )
    origin, timeout = Origin(options), settings.request_timeout
    checked = Middleware(app, state, front.metrics, options.max_body, places, origin, timeout)
    return with_cors(checked, options)  # outermost, so that web pages can also read refusals


def make_health_app(settings: FrontSettings, state: ServerState) -> ASGIApp:
    """Return an application that only has the health routes, for a separate port."""
    front = Front(settings, state)
    app = _new_app(front)
    add_health(app, state, front.refusal)
    return Middleware(app, state, front.metrics, settings.options.max_body)


def _new_app(front: Front) -> FastAPI:
    app = FastAPI(
        title="canvasrt",
        version=canvasrt.__version__,
        description="Text, decisions and infilling by a diffusion model.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_url=None,
        redirect_slashes=False,  # a redirect would contain the Host header that the caller sent
        lifespan=front.lifespan,
        telemetry=telemetry(QUIET),
        generate_unique_id_function=_operation_id,
    )
    app.add_exception_handler(ApiError, _known)  # type: ignore[arg-type]
    app.add_exception_handler(Disconnected, _left)
    app.add_exception_handler(HTTPException, _no_route)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _bug)
    return app


def _operation_id(route: APIRoute) -> str:
    path = route.path_format.translate(str.maketrans("/.", "__", "{}"))
    return f"{min(route.methods or ()).lower()}{path}"


async def _known(request: Request, error: ApiError) -> Response:
    return error.response(request.url.path)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=DISCONNECTED)


async def _bug(request: Request, error: Exception) -> Response:
    return internal_error(request.scope[ID], request.url.path)  # the middleware logs the error


async def _no_route(request: Request, error: HTTPException) -> Response:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        reply = ApiError(404, f"Unknown request URL: {method} {path}.", code="unknown_url")
    elif error.status_code == 405:
        reply = ApiError(405, f"{path} does not support {method}.", code="method_not_supported")
    else:
        reply = ApiError(error.status_code, str(error.detail))
    reply.headers |= dict(error.headers or {})
    return reply.response(path)
