"""Routes that describe the server: models, version, metadata, licence and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from typing_extensions import TypedDict

import canvasrt
from canvasrt.containers.openai.auth import Keys
from canvasrt.containers.openai.endpoint import errors
from canvasrt.containers.openai.errors import unknown_model
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.metrics import FrontMetrics, OtherMetrics
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.extras import license_text
from canvasrt.types import Json

API_VERSION = "1.0"
LICENSE = ("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
_FORBIDDEN, _GUARDED = errors(403), errors(401, 403)


class Model(TypedDict):
    """One name of the served model."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int | None


class Models(TypedDict):
    """All names of the served model."""

    object: str
    data: list[Model]


def add_models(app: FastAPI, options: FrontOptions, keys: Keys) -> None:
    """Add the routes that list models, in OpenAI's form."""
    created = int(time.time())

    def shown(name: str) -> Json:
        context = options.about.get("max_context")
        common = {"object": "model", "created": created, "owned_by": "canvasrt"}
        return {"id": name, **common, "max_model_len": context}

    @app.get("/v1/models", summary="List the models.", response_model=Models, responses=_GUARDED)
    async def models(request: Request) -> Response:
        keys.check(request.headers)
        return JSONResponse({"object": "list", "data": [shown(name) for name in options.names]})

    @app.get(
        "/v1/models/{name:path}",
        summary="Describe a model.",
        response_model=Model,
        responses=errors(401, 403, 404),
    )
    async def model(request: Request, name: str) -> Response:
        keys.check(request.headers)
        if name not in options.names:
            raise unknown_model(name, options.names)
        return JSONResponse(shown(name))


def add_management(
    app: FastAPI,
    options: FrontOptions,
    state: ServerState,
    metrics: FrontMetrics,
    others: Sequence[OtherMetrics],
) -> None:
    """Add NIM's management routes and the metrics routes."""

    @app.get(
        "/v1/version",
        summary="The release, and the version of this API.",
        response_model=dict[str, str],
        responses=_FORBIDDEN,
    )
    async def version() -> Response:
        return JSONResponse({"release": canvasrt.__version__, "api": API_VERSION})

    @app.get("/version", include_in_schema=False)
    async def plain_version() -> Response:
        return JSONResponse({"version": canvasrt.__version__})

    @app.get("/v1/metadata", summary="What is served.", response_model=Json, responses=_FORBIDDEN)
    async def metadata() -> Response:
        name, url = LICENSE
        about = {name: each for name, each in options.about.items() if name != "files"}
        if state.phase == "serving" and state.detail:
            about = {**about, "passes": json.loads(state.detail)}
        return JSONResponse(
            {
                "id": f"canvasrt-{canvasrt.__version__}",
                "version": canvasrt.__version__,
                "assetInfo": [f"sha256:{about['digest']}"] if about.get("digest") else [],
                "licenseInfo": {"name": name, "url": url},
                "modelInfo": [{"shortName": each, "modelUrl": ""} for each in options.names],
                **about,
            }
        )

    @app.get(
        "/v1/manifest",
        summary="The profile that is served, and the digests of its bundle's files.",
        response_model=Json,
        responses=_FORBIDDEN,
    )
    async def manifest() -> Response:
        told = {name: options.about.get(name) for name in ("digest", "profile", "files")}
        return JSONResponse({"model": options.names[0], **told})

    @app.get(
        "/v1/license",
        summary="The license of this server.",
        response_model=dict[str, str | None],
        responses=_FORBIDDEN,
    )
    async def license() -> Response:
        name, url = LICENSE
        content = license_text()
        digest = hashlib.sha256(content.encode()).hexdigest() if content else None
        return JSONResponse({"name": name, "url": url, "content": content, "sha256": digest})

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", include_in_schema=False)
    @app.get(
        "/v1/metrics", summary="Metrics, in Prometheus' format.", responses=_FORBIDDEN | {200: text}
    )
    async def all_metrics() -> Response:
        texts = await asyncio.gather(*(each.text() for each in others))
        text = "".join([*texts, metrics.text(state.in_flight)])
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
