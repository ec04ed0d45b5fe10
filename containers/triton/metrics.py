"""Publishes the generators' counters on Triton's metrics endpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from canvasrt.runtime.generator import Generator
from canvasrt.runtime.passes import Counters

INTERVAL = 0.25  # seconds between updates of counters, because an update calls the server's process
GAUGES = {
    "requests_in_flight": "Requests running or waiting",
    # Triton forwards requests immediately, so its own pending count is always 0.
    "requests_waiting": "Requests waiting for a place in the batch",
    "active_canvases": "Canvases in the last denoising pass",
}
_COUNTED = {
    "encode_tokens": "Tokens encoded into the KV cache",
    "cached_tokens": "Prompt tokens taken from the prefix cache instead of encoded",
    "encode_seconds": "Seconds in encoding passes",
    "denoise_passes": "Denoising passes; each serves every canvas in its batch",
    "denoise_seconds": "Seconds in denoising passes",
    "overflows": "Segment runs repeated because an expert's capacity was too small",
    "failed_passes": "Passes that failed, with all of their requests",
}


class Metrics:
    """Gauges and counters named `canvasrt_*`. `pb_utils` is the Python backend's module."""

    def __init__(self, pb_utils: Any) -> None:
        # Keep references: a metric disappears when its family is garbage-collected.
        self._families: list[Any] = []
        self._gauges = {
            name: self._metric(pb_utils, name, about, "GAUGE") for name, about in GAUGES.items()
        }
        for gauge in self._gauges.values():
            gauge.set(0)
        self._counters = {
            name: self._metric(pb_utils, f"{name}_total", about, "COUNTER")
            for name, about in _COUNTED.items()
        }
        self._seen = Counters()
        self._due = 0.0
        self._shown = dict.fromkeys(GAUGES, 0)

    def update(self, generators: Sequence[Generator], in_flight: int) -> None:
        """Report the sums over all generators. Gauges are updated immediately, because shutdown reads the number of
        requests in flight. Counters are updated at intervals, and when all generators are idle."""
        values = {
            "requests_in_flight": in_flight,
            "requests_waiting": max(0, in_flight - sum(each.max_batch for each in generators)),
            "active_canvases": sum(each.active_canvases for each in generators),
        }
        for name, value in values.items():
            if value != self._shown[name]:
                self._shown[name] = value
                self._gauges[name].set(value)
        if not all(each.idle for each in generators) and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + INTERVAL
        for name, metric in self._counters.items():
            now = sum(getattr(each.model.counters, name) for each in generators)
            change = now - getattr(self._seen, name)
            if change:
                metric.increment(change)
                setattr(self._seen, name, now)

    def _metric(self, pb_utils: Any, name: str, about: str, kind: str) -> Any:
        family = pb_utils.MetricFamily(
            name=f"canvasrt_{name}", description=about, kind=getattr(pb_utils.MetricFamily, kind)
        )
        self._families.append(family)
        return family.Metric(labels={})
