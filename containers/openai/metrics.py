"""Metrics in Prometheus' text format: the front end's own, Triton's and the GPUs'."""

from __future__ import annotations

import asyncio
import bisect
import http.client
import logging
import re
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from canvasrt import nvml

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BOUNDS = (*map(str, _BUCKETS), "+Inf")
_TIMEOUT = 3.0  # seconds to wait for data from Triton
_LONGEST = 10.0  # maximum seconds that a caller waits for a read
log = logging.getLogger(__name__)
_MOST_NAMED = 256  # maximum number of ignored fields that are logged
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Histogram:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(_BUCKETS, seconds)] += 1
        self.sum += seconds


class FrontMetrics:
    """The metrics of all requests. Not thread-safe."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        self.seconds: dict[str, Histogram] = defaultdict(Histogram)
        self.first_piece: dict[str, Histogram] = defaultdict(Histogram)
        self._tokens = {"prompt": 0, "completion": 0}
        self._steps = 0
        self._ignored = 0
        self._named: set[str] = set()

    def add(self, prompt: int, completion: int, steps: int) -> None:
        """Count an answer's tokens and denoising steps."""
        self._tokens["prompt"] += prompt
        self._tokens["completion"] += completion
        self._steps += steps

    def ignore(self, warnings: Iterable[str]) -> None:
        """Count a request's warnings about ignored fields, and log each different warning once."""
        for warning in warnings:
            self._ignored += 1
            name = re.sub(r"\[\d+\]", "", warning)[:200]
            if name not in self._named and len(self._named) < _MOST_NAMED:
                self._named.add(name)
                log.info("ignored, and not logged again: %s", name)

    def text(self, in_flight: int) -> str:
        """Return all metrics as text."""
        requests = {
            f'{{endpoint="{endpoint}",status="{status}"}}': count
            for (endpoint, status), count in sorted(self.requests.items())
        }
        tokens = {f'{{kind="{kind}"}}': count for kind, count in self._tokens.items()}
        lines = [
            *_metric("requests_total", "counter", "Requests by endpoint and status", requests),
            *_metric("requests_in_flight", "gauge", "Requests being answered", {"": in_flight}),
            *_metric("tokens_total", "counter", "Tokens of answered requests", tokens),
            *_metric(
                "denoising_steps_total",
                "counter",
                "Denoising steps of answered requests",
                {"": self._steps},
            ),
            *_metric(
                "ignored_fields_total", "counter", "Ignored fields of requests", {"": self._ignored}
            ),
            *_histograms("request_seconds", "Seconds of a whole request", self.seconds),
            *_histograms(
                "first_piece_seconds",
                "Seconds until the first piece of a streamed answer",
                self.first_piece,
            ),
        ]
        return "\n".join([*lines, ""])


def _metric(
    name: str,
    kind: str,
    about: str,
    values: Mapping[str, float],
    prefix: str = "canvasrt_openai",
) -> list[str]:
    name = f"{prefix}_{name}"
    shown = [f"{name}{labels} {value}" for labels, value in values.items()]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *shown]


def _histograms(name: str, about: str, found: dict[str, Histogram]) -> list[str]:
    lines, name = _metric(name, "histogram", about, {}), f"canvasrt_openai_{name}"
    for endpoint, histogram in sorted(found.items()):
        totals, label = list(accumulate(histogram.counts)), f'endpoint="{endpoint}"'
        for bound, total in zip(_BOUNDS, totals, strict=True):
            lines.append(f'{name}_bucket{{{label},le="{bound}"}} {total}')
        lines.append(f"{name}_sum{{{label}}} {histogram.sum:.6f}")
        lines.append(f"{name}_count{{{label}}} {totals[-1]}")
    return lines


class OtherMetrics:
    """Reads metrics from another source, on a thread. Callers that ask during a read share its result."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read_text = read
        self._reading: asyncio.Task[str] | None = None

    async def text(self) -> str:
        """Return the text of the metrics; empty if the source does not answer in time."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        # The shield keeps a disconnecting caller from cancelling the read; the timeout protects callers from a GPU that
        # hangs.
        try:
            return await asyncio.wait_for(asyncio.shield(self._reading), _LONGEST)
        except TimeoutError:
            return ""

    async def _read(self) -> str:
        try:
            # A read that hangs delays nothing else, because only metrics use the event loop's default threads.
            return await asyncio.to_thread(self._read_text)
        finally:
            self._reading = None


def gpu_text() -> str:
    """Return the gauges of this machine's GPUs as text; empty without GPUs."""
    lines, found = [], nvml.readings()
    for name, gauge in nvml.GAUGES.items():
        values = {
            f'{{gpu="{uuid}"}}': values[name] for uuid, values in found.items() if name in values
        }
        if values:
            lines += _metric(f"gpu_{name}", "gauge", gauge.about, values, "canvasrt")
    return "\n".join([*lines, ""]) if lines else ""


def triton_text(url: str) -> str:
    """Return the text of Triton's metrics endpoint; empty if it does not answer."""
    try:
        with _DIRECT.open(url, timeout=_TIMEOUT) as reply:
            text: str = reply.read().decode()
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    return text
