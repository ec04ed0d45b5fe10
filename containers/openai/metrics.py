"""The front end's metrics, in Prometheus' text format, next to Triton's."""

from __future__ import annotations

import asyncio
import bisect
import http.client
import urllib.request
from collections import defaultdict

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TIMEOUT = 3.0  # seconds
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Histogram:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(_BUCKETS, seconds)] += 1
        self.sum += seconds


class FrontMetrics:
    """The metrics of all requests. Used on one event loop only."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        self.seconds: dict[str, Histogram] = defaultdict(Histogram)
        self.first: dict[str, Histogram] = defaultdict(Histogram)
        self.tokens = {"prompt": 0, "completion": 0}
        self.steps = 0

    def text(self, in_flight: int) -> str:
        """Return all metrics as text."""
        name = "canvasrt_openai"
        lines = _head(f"{name}_requests_total", "counter", "Requests by endpoint and status")
        for (endpoint, status), count in sorted(self.requests.items()):
            labels = f'endpoint="{endpoint}",status="{status}"'
            lines.append(f"{name}_requests_total{{{labels}}} {count}")
        lines += _head(f"{name}_requests_in_flight", "gauge", "Requests being answered")
        lines.append(f"{name}_requests_in_flight {in_flight}")
        lines += _head(f"{name}_tokens_total", "counter", "Tokens of answered requests")
        lines += [f'{name}_tokens_total{{kind="{k}"}} {n}' for k, n in self.tokens.items()]
        lines += _head(f"{name}_denoising_steps_total", "counter", "Their denoising steps")
        lines.append(f"{name}_denoising_steps_total {self.steps}")
        whole = "Seconds of a whole request"
        lines += _histograms(f"{name}_request_seconds", whole, self.seconds)
        first = "Seconds until the first piece of a streamed answer"
        lines += _histograms(f"{name}_first_piece_seconds", first, self.first)
        return "\n".join([*lines, ""])


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _histograms(name: str, about: str, found: dict[str, Histogram]) -> list[str]:
    lines = _head(name, "histogram", about)
    for endpoint, histogram in sorted(found.items()):
        total = 0
        bounds = (*map(str, _BUCKETS), "+Inf")
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{endpoint="{endpoint}",le="{bound}"}} {total}')
        lines.append(f'{name}_sum{{endpoint="{endpoint}"}} {histogram.sum:.6f}')
        lines.append(f'{name}_count{{endpoint="{endpoint}"}} {total}')
    return lines


class TritonMetrics:
    """Triton's metrics, which are read once at a time: those who ask meanwhile get the same."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._reading: asyncio.Task[str] | None = None

    async def text(self) -> str:
        """Return the text of the metrics endpoint; empty without an answer."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)  # which goes on when one of its callers leaves

    async def _read(self) -> str:
        try:
            # Nothing else uses the event loop's own threads.
            return await asyncio.to_thread(_fetch, self._url)
        finally:
            self._reading = None


def _fetch(url: str) -> str:
    try:
        with _DIRECT.open(url, timeout=_TIMEOUT) as reply:
            text: str = reply.read().decode()
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    return text
