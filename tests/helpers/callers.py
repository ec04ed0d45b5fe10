"""Fake callers of a worker, without Triton."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

from canvasrt.containers.triton.worker import Worker
from canvasrt.containers.triton.workers import Workers
from canvasrt.runtime.request import Event, Finished, Request


@dataclass
class Caller:
    """A sink that records how its request ended."""

    disconnected: bool = False
    ends: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def event(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.ends.put(event.result)

    def fail(self, error: BaseException) -> None:
        self.ends.put(error)

    def cancelled(self) -> bool:
        return self.disconnected


def submit(
    worker: Worker | Workers, request: Request, caller: Caller, begin: float | None = None
) -> None:
    worker.submit(request, worker.take_ticket(request.owner, caller, begin))
