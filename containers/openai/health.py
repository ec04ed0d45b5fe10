"""The health routes, and the phase of the server that they report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from canvasrt.containers.openai.auth import Callers
from canvasrt.containers.openai.endpoint import errors
from canvasrt.containers.openai.errors import ApiError, unavailable
from canvasrt.containers.openai.options import ServerPhase

# Phase → seconds until a retry makes sense, and the message of the error until then.
_WAIT = {
    "starting": (2, "The server is starting."),
    "building": (30, "The engines are being built for this GPU; this happens once."),
    "loading": (5, "The model is being loaded."),
    "failed": (5, "The engines have failed, and the server is shutting down."),
    "stopping": (2, "The server is stopping."),
}


# Routes that accept any Host header, because probes use the IP address.
HEALTH = ("/v1/health/live", "/v1/health/ready", "/health", "/ping")
# Monitoring polls these, so successful requests are neither logged nor traced.
QUIET = (*HEALTH, "/v1/metrics", "/metrics")


@dataclass
class ServerState:
    """The server's phase, as the supervisor reports it. `detail` describes the phase's progress. `callers` limits the
    answers per API key, over all ports."""

    phase: ServerPhase = "starting"
    detail: str = ""
    in_flight: int = 0
    callers: Callers = field(default_factory=lambda: Callers(None))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request as in flight inside the `with` block."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def refusal(self) -> ApiError | None:
        """Return the error with which a request is refused now, or None if this process accepts requests."""
        if self.phase == "serving":
            return None
        seconds, message = _WAIT[self.phase]
        error = unavailable(f"{message} {self.detail}".strip(), self.phase, seconds)
        if self.phase == "stopping":
            error.headers["Connection"] = "close"
        return error


def add_health(
    app: FastAPI, state: ServerState, refusal: Callable[[], Awaitable[ApiError | None]]
) -> None:
    """Add the routes. `refusal` returns the error with which a request is refused now, or None."""

    # The names under which vLLM and SageMaker expect `/v1/health/ready`.
    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)
    @app.get("/health", include_in_schema=False)
    async def health() -> Response:
        return await ready()

    @app.get(
        "/v1/health/live",
        summary="Whether the process is alive.",
        response_model=dict[str, str],
        responses=errors(503),
    )
    async def live() -> Response:
        if state.phase == "failed" and (error := state.refusal()) is not None:
            raise error
        body = {"object": "health.response", "message": "Service is live.", "status": "live"}
        return JSONResponse({**body, "phase": state.phase, "detail": state.detail})

    @app.get(
        "/v1/health/ready",
        summary="Whether the server is ready for requests.",
        response_model=dict[str, str],
        responses=errors(503),
    )
    async def ready() -> Response:
        if (error := await refusal()) is not None:
            raise error
        body = {"object": "health.response", "message": "Service is ready.", "status": "ready"}
        return JSONResponse(body)
