"""Threads that run searches while passes run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from canvasrt.runtime.schedule import Schedule


@dataclass(eq=False)
class _Job:
    owner: str
    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    passes: int = 0
    turn: int = 0
    place: int = 0
    parks: bool = False
    searches: bool = False


class Searchers:
    """A pool of threads that callers use in turn."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "canvasrt-grammar")
        self._schedule = Schedule(1)
        self._lock = threading.Lock()  # guards the schedule and the jobs
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []

    def submit(self, owner: str, work: Callable[[], Any]) -> Future[Any]:
        """Queue `work`, to run when it is the turn of its caller, `owner`. Return the future result."""
        job = _Job(owner, work)
        with self._lock:
            self._schedule.join(job, [*self._waiting, *self._running])
            self._waiting.append(job)
        self._pool.submit(self._run)
        return job.future

    def _run(self) -> None:
        with self._lock:
            job = self._schedule.next(self._waiting)
            self._waiting.remove(job)
            self._schedule.begin(job)
            self._running.append(job)
        if job.future.set_running_or_notify_cancel():
            try:
                job.future.set_result(job.work())
            except BaseException as error:  # an executor catches all errors, too
                job.future.set_exception(error)
        with self._lock:
            self._running.remove(job)
