"""The generator's counters on Triton's metrics endpoint."""

from __future__ import annotations

import time
from typing import Any

from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Counters

INTERVAL = 0.25  # seconds; every change of a metric is a call to the server's process
_COUNTED = {
    "encode_tokens": "Tokens encoded into the KV cache",
    "encode_seconds": "Seconds in encoding passes",
    "denoise_passes": "Denoising passes; one serves every canvas in its batch",
    "denoise_seconds": "Seconds in denoising passes",
    "overflows": "Segment runs repeated because an expert's capacity was too small",
}


class Metrics:
    """Gauges and counters named `canvasrt_*`. `pb_utils` is the Python backend's module."""

    def __init__(self, pb_utils: Any) -> None:
        self._families: list[Any] = []  # a metric goes when its family is collected
        self._requests = self._metric(
            pb_utils, "requests_in_flight", "Requests running or waiting", "GAUGE"
        )
        self._requests.set(0)
        self._counters = {
            name: self._metric(pb_utils, f"{name}_total", about, "COUNTER")
            for name, about in _COUNTED.items()
        }
        self._seen = Counters()
        self._due = 0.0
        self._in_flight = 0

    def update(self, generator: Generator, in_flight: int) -> None:
        """Reports a change in requests at once, since stopping waits for it, and the counters now and
        then, and when the work is done."""
        if in_flight != self._in_flight:
            self._in_flight = in_flight
            self._requests.set(in_flight)
        if not generator.idle and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + INTERVAL
        now = generator.model.counters
        for name, metric in self._counters.items():
            change = getattr(now, name) - getattr(self._seen, name)
            if change:
                metric.increment(change)
                setattr(self._seen, name, getattr(now, name))

    def _metric(self, pb_utils: Any, name: str, about: str, kind: str) -> Any:
        family = pb_utils.MetricFamily(
            name=f"canvasrt_{name}", description=about, kind=getattr(pb_utils.MetricFamily, kind)
        )
        self._families.append(family)
        return family.Metric(labels={})
