"""OpenTelemetry traces: FastAPI writes a span per request, and this module one per block.

Both are off unless the standard variable names a collector; then the SDK's own variables apply, too.
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
    """Return FastAPI's settings: a span per request, with the caller's `traceparent`; none for the `quiet` paths."""
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
    """Writes the spans of a request's blocks, as children of the request's; none where it has none."""

    def __init__(self) -> None:
        self._request = trace.get_current_span()
        self._arrived = time.time_ns()
        self._ended: dict[int, tuple[int, int]] = {}  # answer → its finished blocks, and when

    def see(self, answer: int, event: StreamEvent) -> None:
        """Look at an event of an answer, and write the span of the block that it ends."""
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
