"""OpenTelemetry traces: FastAPI writes a span per request, and this module writes a span per block.

Spans are only written if the standard environment variable names a collector. The SDK's other variables apply, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.names import COLLECTOR


def telemetry(quiet: Collection[str]) -> TelemetryConfig:
    """Return FastAPI's settings for a span per request, except for the paths in `quiet`. Spans continue the trace that
    the caller's header `traceparent` names."""
    on = bool(os.environ.get(COLLECTOR))
    if on:
        os.environ.setdefault("OTEL_SERVICE_NAME", "canvasrt")
    return {
        "tracing": on,
        "auto_configure": on,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "exclude": lambda scope: scope.get("path") in quiet,
    }


class Blocks:
    """Writes a span for each block of a request, as a child of the request's span. Does nothing if the request has no
    span."""

    def __init__(self) -> None:
        self._request = trace.get_current_span()
        self._arrived = time.time_ns()
        # Index of an answer → number of its finished blocks, and the time when the last one ended.
        self._ended: dict[int, tuple[int, int]] = {}

    def see(self, answer: int, event: StreamEvent) -> None:
        """If this event ends a block of the answer, write the block's span."""
        if not self._request.is_recording():
            return
        done, begin = self._ended.get(answer, (0, self._arrived))
        if len(event.steps) <= done:
            return
        self._ended[answer] = len(event.steps), (now := time.time_ns())
        about = {"answer": answer, "block": len(event.steps) - 1, "steps": event.steps[-1]}
        trace.get_tracer("canvasrt").start_span(
            "block",
            trace.set_span_in_context(self._request),
            attributes={f"canvasrt.{name}": value for name, value in about.items()},
            start_time=begin,
        ).end(now)
