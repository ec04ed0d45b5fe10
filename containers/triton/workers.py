"""Distributes requests over the workers of several GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from canvasrt.containers.triton.tickets import Sink, Ticket
from canvasrt.containers.triton.worker import Worker
from canvasrt.errors import EngineError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.request import Request

Observe = Callable[[Sequence[Generator], int], None]


class Workers:
    """Submits each request to a worker. Callers' limits apply to all workers together.

    Of the workers that have a free place, the one with the fewest requests gets a new request. If no worker has a free
    place, the request waits at the worker with the fewest requests of its caller. So if turns are fair on each GPU,
    they are fair overall. Waiting requests move to workers that have a free place; a request that has begun stays. A
    worker that seems stuck gets no requests unless all workers seem stuck.
    """

    def __init__(
        self,
        makes: Sequence[Callable[[], Generator]],
        observe: Observe,
        beat: Callable[[float], None],
        lost: Callable[[EngineError], None],
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """makes: the `make` of every GPU's worker. observe: called with the generators of all workers. beat: called
        with the earliest of the workers' last beats. lost, max_tokens, timeout: see `Worker`."""
        self._observe, self._beat = observe, beat
        self._generators: dict[int, Generator] = {}
        self._lock = threading.Lock()
        self.all: list[Worker] = []
        for number, make in enumerate(makes):
            seen = partial(self._seen, number)
            self.all.append(Worker(make, seen, self._beaten, lost, max_tokens, timeout, self.all))

    def take_ticket(self, owner: str, sink: Sink, begin: float | None = None) -> Ticket:
        """See `Worker.take_ticket`."""
        return self.all[0].take_ticket(owner, sink, begin)

    def submit(self, request: Request, ticket: Ticket) -> None:
        """See `Worker.submit`."""
        moving = [each for each in self.all if not each.is_stuck] or self.all
        free = [each for each in moving if each.is_free]
        best = min(
            free or moving, key=lambda each: (0 if free else each.count(request.owner), each.load)
        )
        best.submit(request, ticket)

    def close(self) -> None:
        """See `Worker.close`."""
        for each in self.all:
            each.close()

    def _seen(self, number: int, generator: Generator, in_flight: int) -> None:
        with self._lock:
            self._generators[number] = generator
            self._observe(list(self._generators.values()), in_flight)

    def _beaten(self) -> None:
        self._beat(min((each.beaten for each in self.all), default=time.monotonic()))
