"""The HTTP application."""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import canvasrt
from canvasrt.containers.openai.auth import Keys
from canvasrt.containers.openai.completions import Completions
from canvasrt.containers.openai.disconnect import CallerGone
from canvasrt.containers.openai.errors import ApiError, unavailable
from canvasrt.containers.openai.metrics import FrontMetrics, triton_metrics
from canvasrt.containers.openai.middleware import HANGUP, ID, Edge, internal_error
from canvasrt.containers.openai.schema import ChatRequest, CompletionRequest, read_body
from canvasrt.containers.openai.state import Settings, State
from canvasrt.containers.openai.upstream import Upstream

API_VERSION = "1.0"
_LICENSE = ("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
_NO_SCHEMA: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None}


class Front:
    """What the routes share."""

    def __init__(self, settings: Settings, state: State) -> None:
        self.settings = settings
        self.state = state
        self.metrics = FrontMetrics()
        self.keys = Keys(settings.keys)
        self.created = int(time.time())
        self._upstream: Upstream | None = None
        self._completions: Completions | None = None

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Holds the connection to Triton, which belongs to the event loop."""
        self._upstream = Upstream(self.settings.grpc)
        fingerprint = "fp_" + str(self.settings.about.get("digest", ""))[:12]
        self._completions = Completions(self._upstream, self.metrics, fingerprint)
        yield
        await self._upstream.close()

    async def refusal(self) -> ApiError | None:
        """Why no request can be taken now, which Triton has a say in too."""
        refusal = self.state.refusal()
        if refusal is None and not (self._upstream and await self._upstream.is_ready()):
            return unavailable("The model is not ready.", "model_not_ready")
        return refusal

    async def generate(
        self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> Response:
        """Answers one request for text."""
        self.keys.check(request.headers.get("authorization"))
        if (refusal := self.state.refusal()) is not None:
            raise refusal
        asked = read_body(kind, await request.body())
        self.check_model(asked.model)
        assert self._completions is not None
        return await self._completions.reply(request, asked)

    def check_model(self, name: str) -> None:
        """ApiError 404 for a model that is not served here."""
        if name not in self.settings.names:
            served = ", ".join(self.settings.names)
            raise ApiError(
                404,
                f"The model {name!r} does not exist; this server has {served}.",
                param="model",
                code="model_not_found",
            )

    def model(self, name: str) -> dict[str, Any]:
        """A model as `/v1/models` describes it."""
        about = self.settings.about
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "canvasrt",
            "max_model_len": about.get("max_context"),
        }


def make_app(settings: Settings, state: State) -> ASGIApp:
    """The application of one server."""
    front = Front(settings, state)
    app = FastAPI(title="canvasrt", lifespan=front.lifespan, **_NO_SCHEMA)
    _add_errors(app)
    _add_health(app, front)
    _add_management(app, front)
    _add_inference(app, front)
    return Edge(app, state, front.metrics, settings.max_body)


def make_health_app(settings: Settings, state: State) -> ASGIApp:
    """An application with nothing but the health routes, for a port of their own."""
    front = Front(settings, state)
    app = FastAPI(title="canvasrt", lifespan=front.lifespan, **_NO_SCHEMA)
    _add_errors(app)
    _add_health(app, front)
    return Edge(app, state, front.metrics, settings.max_body)


def _add_inference(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await front.generate(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await front.generate(request, CompletionRequest)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        front.keys.check(request.headers.get("authorization"))
        found = [front.model(name) for name in front.settings.names]
        return JSONResponse({"object": "list", "data": found})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        front.keys.check(request.headers.get("authorization"))
        front.check_model(name)
        return JSONResponse(front.model(name))


def _add_health(app: FastAPI, front: Front) -> None:
    @app.get("/v1/health/live")
    async def live() -> Response:
        said = {"object": "health.response", "message": "Service is live.", "status": "live"}
        return JSONResponse({**said, "phase": front.state.phase, "detail": front.state.detail})

    @app.get("/v1/health/ready")
    async def ready() -> Response:
        if (refusal := await front.refusal()) is not None:
            raise refusal
        said = {"object": "health.response", "message": "Service is ready.", "status": "ready"}
        return JSONResponse(said)


def _add_management(app: FastAPI, front: Front) -> None:
    @app.get("/v1/version")
    async def version() -> Response:
        return JSONResponse({"release": canvasrt.__version__, "api": API_VERSION})

    @app.get("/v1/metadata")
    async def metadata() -> Response:
        name, url = _LICENSE
        about = front.settings.about
        models = [{"shortName": each, "modelUrl": ""} for each in front.settings.names]
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
        triton = await triton_metrics(front.settings.metrics)
        return PlainTextResponse(triton + own, media_type="text/plain; version=0.0.4")


def _license_text() -> str:
    """The licence as the install carries it; empty where it carries none."""
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

    @app.exception_handler(CallerGone)
    async def gone(request: Request, error: CallerGone) -> Response:
        return Response(status_code=HANGUP)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return internal_error(request.scope[ID])  # and the edge logs it

    @app.exception_handler(HTTPException)
    async def unknown_route(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        if error.status_code == 404:
            said = ApiError(404, f"Unknown request URL: {method} {path}.", code="unknown_url")
        elif error.status_code == 405:
            said = ApiError(405, f"{path} does not take {method}.", code="method_not_supported")
        else:
            said = ApiError(error.status_code, str(error.detail))
        said.headers |= dict(error.headers or {})
        return said.response()
