"""The HTTP application."""

from __future__ import annotations

import hashlib
import importlib.metadata
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.types import ASGIApp

import canvasrt
from canvasrt.containers.openai.aside import Aside
from canvasrt.containers.openai.auth import Callers, Keys
from canvasrt.containers.openai.completions import Completions
from canvasrt.containers.openai.connections import Places
from canvasrt.containers.openai.decisions import (
    DecisionRequest,
    Decisions,
    InfillRequest,
    SystemOneRequest,
)
from canvasrt.containers.openai.disconnect import Disconnected
from canvasrt.containers.openai.docs import add_docs
from canvasrt.containers.openai.errors import ApiError, unavailable
from canvasrt.containers.openai.inputs import RequestLimits
from canvasrt.containers.openai.metrics import FrontMetrics, TritonMetrics
from canvasrt.containers.openai.middleware import (
    AT_END,
    CALLER,
    DISCONNECTED,
    ID,
    MORE,
    Middleware,
    internal_error,
)
from canvasrt.containers.openai.ollama import add_ollama
from canvasrt.containers.openai.options import FrontSettings
from canvasrt.containers.openai.origin import Origin, add_cors
from canvasrt.containers.openai.remote import Fetcher
from canvasrt.containers.openai.respond import respond
from canvasrt.containers.openai.responses import ResponsesRequest
from canvasrt.containers.openai.schema import (
    BodyT,
    ChatRequest,
    CompletionRequest,
    Sampling,
    parse_body,
    read_body,
)
from canvasrt.containers.openai.state import ServerState
from canvasrt.containers.openai.tokenize import DetokenizeRequest, TokenizeRequest, Tokens
from canvasrt.containers.openai.upstream import Upstream
from canvasrt.containers.openai.web_page import add_page
from canvasrt.runtime.prefix import ANYBODY

Own = TypeVar(
    "Own", DecisionRequest, SystemOneRequest, InfillRequest, TokenizeRequest, DetokenizeRequest
)
API_VERSION = "1.0"
_LONG, _LEVEL = 4096, 4  # bytes of a body that is worth compressing, and how much
_LICENSE = ("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
_NO_SCHEMA: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None}


class OpenAIRoutes:
    """State that the routes share."""

    def __init__(self, settings: FrontSettings, state: ServerState) -> None:
        self.settings = settings
        self.options = settings.options
        self.state = state
        self.metrics = FrontMetrics()
        self.triton_metrics = TritonMetrics(settings.metrics)
        self.aside = Aside()
        self.keys = Keys(settings.options.keys)
        self.callers = Callers(settings.options.max_key_requests)
        self.created = int(time.time())
        self.decisions: Decisions
        self.tokens: Tokens
        self._upstream: Upstream | None = None
        self._completions: Completions | None = None

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Hold the connection to Triton, which belongs to the event loop."""
        self._upstream = Upstream(self.settings.grpc, self.settings.request_timeout)
        fingerprint = "fp_" + str(self.options.about.get("digest", ""))[:12]
        fetcher = Fetcher() if self.options.allow_remote_images else None
        limits = RequestLimits(self.options.max_n, self.options.about.get("max_context"))
        self._completions = Completions(
            self._upstream, self.metrics, fingerprint, limits, self.aside, fetcher
        )
        self.decisions = Decisions(self._upstream, self.metrics, self.aside, fetcher)
        self.tokens = Tokens(self._upstream, self.aside, limits.max_context)
        yield
        self.aside.close()
        await self._upstream.close()
        if fetcher is not None:
            fetcher.close()

    async def refusal(self) -> ApiError | None:
        """Return why no request can be accepted now, by this process or by Triton; None when one
        can."""
        refusal = self.state.refusal()
        if refusal is None and not (self._upstream and await self._upstream.is_ready()):
            return unavailable("The model is not ready.", "model_not_ready")
        return refusal

    @property
    def models(self) -> tuple[str, ...]:
        """The names that the model is served under."""
        return self.options.names

    @property
    def lenient(self) -> bool:
        """Whether parameters that are not supported are left out, with a warning."""
        return self.options.lenient

    def admit(self, request: Request) -> Completions:
        """Return what answers a caller, who is counted until the reply has ended.

        ApiError without a key, over the caller's limit, or while nothing is accepted.
        """
        caller = self.keys.check(request.headers.get("authorization"))
        if (refusal := self.state.refusal()) is not None:
            raise refusal
        request.scope[MORE] = request.scope[AT_END].enter_context(self.callers.one(caller))
        # Without keys, every request is a caller of its own.
        request.scope[CALLER] = caller or ANYBODY + secrets.token_hex(8)
        assert self._completions is not None
        return self._completions

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Return a request's checked body."""
        raw = await request.body()
        return await self.aside.run(len(raw), read_body, kind, raw, self.lenient)

    async def generate(self, request: Request, kind: type[Sampling]) -> Response:
        """Answer one request for text."""
        completions = self.admit(request)
        body = await self.read(request, kind)
        self.check_model(body.model)
        if isinstance(body, ResponsesRequest):
            return await respond(completions, request, body)
        assert isinstance(body, (ChatRequest, CompletionRequest))
        return await completions.reply(request, body)

    async def answer(
        self,
        request: Request,
        kind: type[Own],
        reply: Callable[[Request, Own], Awaitable[Response]],
    ) -> Response:
        """Answer one request of an endpoint that does not generate text."""
        self.admit(request)
        raw = await request.body()
        body: Own = await self.aside.run(len(raw), parse_body, kind, raw)
        if body.model is not None:
            self.check_model(body.model)
        return await reply(request, body)

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 for a model that is not served here."""
        if name not in self.options.names:
            served = ", ".join(self.options.names)
            raise ApiError(
                404,
                f"The model {name!r} does not exist; this server serves {served}.",
                param="model",
                code="model_not_found",
            )

    def model(self, name: str) -> dict[str, Any]:
        """Return a model as `/v1/models` describes it."""
        about = self.options.about
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "canvasrt",
            "max_model_len": about.get("max_context"),
        }


def make_app(settings: FrontSettings, state: ServerState, places: Places | None = None) -> ASGIApp:
    """Return the application of one server, whose connections have `places`."""
    front = OpenAIRoutes(settings, state)
    app = FastAPI(title="canvasrt", lifespan=front.lifespan, **_NO_SCHEMA)
    _add_errors(app)
    _add_health(app, front)
    _add_management(app, front)
    _add_inference(app, front)
    add_ollama(app, front)
    add_page(app)
    add_docs(app, bool(settings.options.keys))
    app.add_middleware(
        GZipMiddleware,
        minimum_size=_LONG,
        compresslevel=_LEVEL,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/x-ndjson"),
    )
    add_cors(app, front.options)
    origin = Origin(settings.options)
    limit = settings.options.max_body
    return Middleware(app, state, front.metrics, limit, places, origin, settings.request_timeout)


def make_health_app(settings: FrontSettings, state: ServerState) -> ASGIApp:
    """Return an application with only the health routes, for a port of their own."""
    front = OpenAIRoutes(settings, state)
    app = FastAPI(title="canvasrt", lifespan=front.lifespan, **_NO_SCHEMA)
    _add_errors(app)
    _add_health(app, front)
    return Middleware(app, state, front.metrics, settings.options.max_body)


def _add_inference(app: FastAPI, front: OpenAIRoutes) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await front.generate(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await front.generate(request, CompletionRequest)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await front.generate(request, ResponsesRequest)

    @app.post("/v1/decisions")
    async def decisions(request: Request) -> Response:
        return await front.answer(request, DecisionRequest, front.decisions.decide)

    @app.post("/v1/infill")
    async def infill(request: Request) -> Response:
        return await front.answer(request, InfillRequest, front.decisions.infill)

    @app.post("/v1/systemone")
    async def systemone(request: Request) -> Response:
        return await front.answer(request, SystemOneRequest, front.decisions.systemone)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await front.answer(request, TokenizeRequest, front.tokens.tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await front.answer(request, DetokenizeRequest, front.tokens.detokenize)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        front.keys.check(request.headers.get("authorization"))
        found = [front.model(name) for name in front.options.names]
        return JSONResponse({"object": "list", "data": found})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        front.keys.check(request.headers.get("authorization"))
        front.check_model(name)
        return JSONResponse(front.model(name))


def _add_health(app: FastAPI, front: OpenAIRoutes) -> None:
    @app.get("/v1/health/live")
    async def live() -> Response:
        if front.state.phase == "failed" and (refusal := front.state.refusal()) is not None:
            raise refusal
        body = {"object": "health.response", "message": "Service is live.", "status": "live"}
        return JSONResponse({**body, "phase": front.state.phase, "detail": front.state.detail})

    @app.get("/v1/health/ready")
    async def ready() -> Response:
        if (refusal := await front.refusal()) is not None:
            raise refusal
        body = {"object": "health.response", "message": "Service is ready.", "status": "ready"}
        return JSONResponse(body)


def _add_management(app: FastAPI, front: OpenAIRoutes) -> None:
    @app.get("/v1/version")
    async def version() -> Response:
        return JSONResponse({"release": canvasrt.__version__, "api": API_VERSION})

    @app.get("/v1/metadata")
    async def metadata() -> Response:
        name, url = _LICENSE
        about = front.options.about
        models = [{"shortName": each, "modelUrl": ""} for each in front.options.names]
        return JSONResponse(
            {
                "id": f"canvasrt-{canvasrt.__version__}",
                "version": canvasrt.__version__,
                "assetInfo": [f"sha256:{about['digest']}"] if about.get("digest") else [],
                "licenseInfo": {"name": name, "url": url},
                "modelInfo": models,
                **about,
            }
        )

    @app.get("/v1/license")
    async def license() -> Response:
        name, url = _LICENSE
        content = _license_text()
        digest = hashlib.sha256(content.encode()).hexdigest() if content else None
        body = {"name": name, "url": url, "content": content, "sha256": digest}
        return JSONResponse(body)

    @app.get("/v1/metrics")
    async def metrics() -> Response:
        own = front.metrics.text(front.state.in_flight)
        triton = await front.triton_metrics.text()
        return PlainTextResponse(triton + own, media_type="text/plain; version=0.0.4")


def _license_text() -> str:
    """Return the licence that was installed; empty if there is none."""
    try:
        files = importlib.metadata.files("canvasrt") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for file in files:
        if file.name == "LICENSE":
            return str(file.read_text())
    return ""


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(Disconnected)
    async def disconnected(request: Request, error: Disconnected) -> Response:
        return Response(status_code=DISCONNECTED)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return internal_error(request.scope[ID])  # the middleware logs it

    @app.exception_handler(HTTPException)
    async def unknown_route(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        if error.status_code == 404:
            reply = ApiError(404, f"Unknown request URL: {method} {path}.", code="unknown_url")
        elif error.status_code == 405:
            reply = ApiError(405, f"{path} does not support {method}.", code="method_not_supported")
        else:
            reply = ApiError(error.status_code, str(error.detail))
        reply.headers |= dict(error.headers or {})
        return reply.response()
