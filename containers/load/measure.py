"""Runs sessions against endpoints, at a fixed concurrency or arrival rate, and summarizes them."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from canvasrt.containers.load.calls import Endpoint, LoadConnection, TimedCall
from canvasrt.containers.load.sessions import Session
from canvasrt.progress import report

# The measures to compare: field of a summary → name of the measure, and whether less is better.
COMPARED = {
    "first": ("first text", True),
    "gap": ("between pieces", True),
    "total": ("whole answer", True),
    "tokens_per_second": ("tokens per second", False),
}


@dataclass(frozen=True)
class Load:
    """Says how sessions start: `concurrency` at a time, or on average `rate` per second at random times.

    Even with a `rate`, at most `concurrency` run at a time. If this delays a session, the delay counts as latency.
    """

    concurrency: int = 1
    rate: float | None = None


@dataclass(frozen=True)
class Round:
    """The calls of one round. `seconds` is the time from the first scheduled start to the last end."""

    calls: tuple[TimedCall, ...]
    start: float
    seconds: float


@dataclass(frozen=True)
class LatencySpread:
    """Statistics, in milliseconds, of a series of latencies."""

    p50: float
    p90: float
    p99: float
    mean: float
    deviation: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencySpread | None:
        """Return the spread of latencies, given in seconds; None if there are no latencies."""
        if not seconds:
            return None
        values = 1e3 * np.asarray(seconds)
        p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
        extremes = float(values.min()), float(values.max())
        return cls(p50, p90, p99, float(values.mean()), float(values.std()), *extremes)


@dataclass(frozen=True)
class LoadSummary:
    """A server's results. `tokens_per_pass` and `steps` are only known for diffusion models."""

    calls: int
    errors: Mapping[str, int]
    first: LatencySpread | None
    gap: LatencySpread | None
    total: LatencySpread | None
    tokens: int
    tokens_counted: bool
    tokens_per_second: float
    calls_per_second: float
    steps: float | None
    tokens_per_pass: float | None

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> LoadSummary:
        """Summarize rounds. Failed calls only count as errors."""
        calls = [call for each in rounds for call in each.calls]
        good = [call for call in calls if not call.error]
        seconds = sum(each.seconds for each in rounds)
        tokens = sum(call.tokens for call in good)
        stepped = [call for call in good if call.steps]
        steps = sum(call.steps or 0 for call in stepped)
        return cls(
            len(calls),
            dict(Counter(call.error for call in calls if call.error)),
            LatencySpread.of([call.first for call in good if call.first is not None]),
            LatencySpread.of([gap for call in good for gap in call.gaps]),
            LatencySpread.of([call.total for call in good]),
            tokens,
            all(call.counted for call in good),
            tokens / seconds,
            len(good) / seconds,
            steps / len(stepped) if stepped else None,
            sum(call.tokens for call in stepped) / steps if steps else None,
        )

    def value(self, name: str) -> float | None:
        """Return the value of a measure: a median in milliseconds, or a rate."""
        found = getattr(self, name)
        return found.p50 if isinstance(found, LatencySpread) else found

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with a key per field."""
        return asdict(self)


def take_turns(
    endpoints: Sequence[Endpoint],
    sessions: Sequence[Session],
    load: Load,
    rounds: int,
) -> list[list[Round]]:
    """Measure the endpoints in turn, each `rounds` times, after one session per endpoint as a warm-up. Return the
    rounds of every endpoint."""
    for endpoint in endpoints:
        run_sessions(endpoint, sessions[:1], Load())
    taken: list[list[Round]] = [[] for _ in endpoints]
    report("measuring", 0, rounds)
    for number in range(rounds):
        for endpoint, into in zip(endpoints, taken, strict=True):
            into.append(run_sessions(endpoint, sessions, load))
        report("measuring", number + 1, rounds)
    return taken


def ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, list[float]]:
    """Return three ratios of ours to theirs for each measure: the ratio over all rounds, and the lowest and the highest
    ratio of a single round. Leaves out measures that a round lacks."""
    found = {}
    for name in COMPARED:
        sides = [
            (ours, theirs),
            *(([one], [other]) for one, other in zip(ours, theirs, strict=True)),
        ]
        values = [
            (LoadSummary.of(one).value(name), LoadSummary.of(other).value(name))
            for one, other in sides
        ]
        known = [one / other for one, other in values if one is not None and other]
        if len(known) == len(values):
            found[name] = [known[0], min(known[1:]), max(known[1:])]
    return found


def run_sessions(endpoint: Endpoint, sessions: Sequence[Session], load: Load) -> Round:
    """Run every session once, and return the calls as a round."""
    start = time.perf_counter()
    waiting: queue.SimpleQueue[tuple[Session, float | None]] = queue.SimpleQueue()
    for session, offset in zip(sessions, _arrivals(load, len(sessions)), strict=True):
        waiting.put((session, None if offset is None else start + offset))
    calls: list[TimedCall] = []
    count = min(load.concurrency, len(sessions))
    threads = [
        threading.Thread(target=_work, args=(endpoint, waiting, calls), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls.sort(key=lambda call: call.due)
    return Round(tuple(calls), start, max(call.end for call in calls) - start)


def _arrivals(load: Load, count: int) -> list[float | None]:
    """Return the sessions' scheduled starts in seconds; None means as soon as possible."""
    if load.rate is None:
        return [None] * count
    chance = random.Random(0)  # noqa: S311 (arrivals, not secrets)
    moments: list[float | None] = []
    now = 0.0
    for _ in range(count):
        moments.append(now)
        now += chance.expovariate(load.rate)
    return moments


def _work(
    endpoint: Endpoint,
    waiting: queue.SimpleQueue[tuple[Session, float | None]],
    calls: list[TimedCall],
) -> None:
    """Run sessions from the queue until it is empty."""
    connection = LoadConnection(endpoint)
    while True:
        try:
            session, due = waiting.get_nowait()
        except queue.Empty:
            connection.close()
            return
        if due is not None:
            time.sleep(max(0.0, due - time.perf_counter()))
        messages = list(session.start)
        for turn in (*session.turns, None):
            call = connection.call(messages, time.perf_counter() if due is None else due)
            calls.append(call)
            if call.error or turn is None:
                break
            messages += [{"role": "assistant", "content": call.text}, turn]
            due = None  # the next turn is due when the previous answer has arrived
