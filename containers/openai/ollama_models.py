"""Ollama's routes that describe models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from canvasrt.containers.openai.auth import Keys
from canvasrt.containers.openai.body_pool import BodyPool
from canvasrt.containers.openai.endpoint import errors
from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.ollama import OllamaError
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.untrusted import load_json
from canvasrt.types import Json

_ARCHITECTURE = "diffusion_gemma"
# Ollama's release whose API this is. Clients such as GitHub Copilot refuse old releases.
_VERSION = "0.12.11"


def add_ollama_models(app: FastAPI, options: FrontOptions, keys: Keys, pool: BodyPool) -> None:
    """Add the routes. The models' sizes are shown as 0, because this process cannot read the bundle."""
    about, now = options.about, datetime.now(UTC).isoformat().replace("+00:00", "Z")
    details = {
        "parent_model": "",
        "format": "canvasrt",
        "family": _ARCHITECTURE,
        "families": [_ARCHITECTURE],
        "parameter_size": "",
        "quantization_level": str(about.get("precision") or ""),
    }
    context = about.get("max_context")
    able = [each for each in ("thinking", "vision") if about.get(each)]

    def shown(name: str, **more: Any) -> Json:
        digest = str(about.get("digest") or "")
        return {
            "name": name,
            "model": name,
            "size": 0,
            "digest": digest,
            "details": details,
            **more,
        }

    guarded = errors(401, 403, body=OllamaError)

    @app.get(
        "/api/tags",
        summary="List the models for Ollama's clients.",
        response_model=dict[str, list[Json]],
        responses=guarded,
    )
    async def tags(request: Request) -> Response:
        keys.check(request.headers)
        return JSONResponse({"models": [shown(each, modified_at=now) for each in options.names]})

    @app.get(
        "/api/ps",
        summary="List the loaded models for Ollama's clients.",
        response_model=dict[str, list[Json]],
        responses=guarded,
    )
    async def running(request: Request) -> Response:
        keys.check(request.headers)
        more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": context}
        return JSONResponse({"models": [shown(each, **more) for each in options.names]})

    @app.post(
        "/api/show",
        summary="Describe a model for Ollama's clients.",
        response_model=Json,
        responses=errors(400, 401, 403, 404, body=OllamaError),
    )
    async def show(request: Request) -> Response:
        keys.check(request.headers)
        raw = await request.body()
        try:
            body = await pool.run(len(raw), load_json, raw)
        except ValueError as error:
            raise bad_request(f"The body is not JSON: {error}.") from None
        name = body.get("model") or body.get("name") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise bad_request("model is required", "model")
        if name.removesuffix(":latest") not in options.names:
            raise ApiError(404, f"model {name!r} not found")
        info = {
            "general.architecture": _ARCHITECTURE,
            "general.basename": name.removesuffix(":latest"),
            f"{_ARCHITECTURE}.context_length": context,
        }
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "license": "",
                "details": details,
                "model_info": {key: value for key, value in info.items() if value is not None},
                "capabilities": ["completion", "tools", *able],
                "modified_at": now,
            }
        )

    @app.get(
        "/api/version",
        summary="The release of Ollama's API.",
        response_model=dict[str, str],
        responses=errors(403, body=OllamaError),
    )
    async def version() -> Response:
        return JSONResponse({"version": _VERSION})
