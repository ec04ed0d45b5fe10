"""Continuous batching: requests at different blocks and steps share one loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing
from typing import Any

from canvasrt.defaults import MAX_BATCH
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.constrained import ConstrainedRequest, ConstrainedState
from canvasrt.runtime.answers.decision import DecisionRequest, DecisionState
from canvasrt.runtime.answers.infill import InfillRequest, InfillState
from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import check_finite
from canvasrt.runtime.prefix import PrefixCache, share_of
from canvasrt.runtime.request import Event, Finished, Request, Result
from canvasrt.runtime.request_state import RequestState
from canvasrt.runtime.sampling_params import LEAST_WORK, SamplingParams
from canvasrt.runtime.schedule import Schedule
from canvasrt.runtime.text_state import TextState

# Type of request → type of its state.
STATES: dict[type[Request], Any] = {
    Request: TextState,
    ConstrainedRequest: ConstrainedState,
    InfillRequest: InfillState,
    DecisionRequest: DecisionState,
}
_SEARCH_WAIT = 0.004  # seconds to wait for a search when no pass can run
_SEARCH_TURN = 0.5  # seconds of searching after which a request's turn ends, to let others run


class Generator:
    """Runs requests on one model, at most `max_batch` at a time, or fewer if the engines' limit is lower.

    Other requests wait; `Schedule` decides which requests run. `add` and `cancel` can be called from any thread while
    one thread calls `step`.
    """

    def __init__(
        self, model: Model, max_batch: int = MAX_BATCH, prefixes: PrefixCache | None = None
    ) -> None:
        """`prefixes` keeps common prefixes of prompts, so that each prefix is encoded only once; None keeps nothing."""
        if max_batch < 1:
            raise CanvasError(f"max_batch is {max_batch}", "give at least 1")
        self.model = model
        self.max_batch = min(max_batch, model.max_batch or max_batch)
        self._arrived: deque[RequestState] = deque()  # appended by other threads
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._schedule = Schedule(model.quantum)
        self._cancelled: set[int] = set()
        self._next_id = 0
        self._denoised = 0
        self._clock = 0  # in denoising steps
        self._prefixes = prefixes

    @property
    def idle(self) -> bool:
        """True if no request is waiting or running."""
        return not (self._arrived or self._waiting or self._running)

    @property
    def active_canvases(self) -> int:
        """Number of canvases in the last denoising step, but at most the number of requests that are still running."""
        return min(self._denoised, len(self._running))

    @property
    def running(self) -> set[int]:
        """The ids of the requests in the batch."""
        return {each.id for each in self._running}

    def check(self, request: Request) -> None:
        """Raise CanvasError for a request that can never run. Thread-safe."""
        request.check(self.model)

    def add(self, request: Request, is_checked: bool = False) -> int:
        """Queue a request and return its id. `is_checked`: the caller has called `check`."""
        if not is_checked:
            self.check(request)
        id = self._next_id
        self._next_id += 1
        state = STATES[type(request)](id, request, self.model, time.perf_counter())
        self._arrived.append(state)
        return id

    def cancel(self, id: int) -> None:
        """End a request at the next `step`. Its result has the blocks that are finished by then."""
        self._cancelled.add(id)

    def withdraw(self) -> int | None:
        """Remove a waiting request that has had no pass yet: the one that would run next. Return its id, or None if
        there is no such request."""
        self._take_arrived()
        untouched = [each for each in self._waiting if not each.passes]
        if not untouched:
            return None
        each = self._schedule.next(untouched)
        each.cancel()
        self._waiting.remove(each)
        return each.id

    def step(self) -> list[Event]:
        """Run one denoising step, or encode one chunk, of every running request that is ready. Return the events.

        A long prompt is encoded over several steps, one chunk at a time. Between two chunks, the other requests run for
        about as long as the earlier chunk took.
        """
        self._take_arrived()
        events = self._drop_cancelled()
        self._give_places()
        events += self._collect()
        self._give_places()  # a finished search can free a place
        events += self._encode()
        return events + self._denoise()

    def abandon(self) -> None:
        """Release all requests after a failed pass; the generator must not be used again.

        Raises EngineError if the device is no longer usable.
        """
        self.model.check_device()
        for each in self._running:
            each.cancel()
            self.model.release(each.row)
        self._running.clear()
        self._waiting.clear()
        self._arrived.clear()

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Run requests to completion; return results in the order of `requests`."""
        ids = [self.add(request) for request in requests]
        results: dict[int, Result] = {}
        while not self.idle:
            for event in self.step():
                if isinstance(event, Finished):
                    results[event.id] = event.result
        return [results[id] for id in ids]

    def probe(self) -> None:
        """Run the shortest possible request, to test the engines. Raises the errors of its passes."""
        model = self.model
        params = SamplingParams.from_defaults(model.sampler, model.config, **LEAST_WORK)
        fitted = params.fitted(model.config, model.max_context - 1, model.canvas_sizes)
        self.run([Request([0], fitted)])

    def stream(self, request: Request) -> Iterator[Event]:
        """Yield one request's events as they happen. Leaving the iteration early cancels the
        request."""
        id = self.add(request)
        done = False
        try:
            while not done:
                if self.idle:
                    raise CanvasError(
                        "another call of step took this stream's events",
                        "to follow several requests, use add and step",
                    )
                for event in self.step():
                    if event.id == id:
                        done = isinstance(event, Finished)
                        yield event
        finally:
            if not done:
                self.cancel(id)
                self._take_arrived()
                self._drop_cancelled()

    def _take_arrived(self) -> None:
        while self._arrived:
            fresh = self._arrived.popleft()
            self._schedule.join(fresh, [*self._waiting, *self._running])
            self._waiting.append(fresh)

    def _give_places(self) -> None:
        """Fill the batch, and let waiting requests replace running ones whose turn is over."""
        ready = [each for each in self._waiting if not each.searches]
        while ready and len(self._running) < self.max_batch:
            self._place(self._schedule.next(ready), ready)
        while (pair := self._schedule.swap(ready, self._running)) is not None:
            best, worst = pair
            worst.park()
            self._running.remove(worst)
            self._waiting.append(worst)
            if not worst.searches:
                ready.append(worst)
            self._place(best, ready)

    def _place(self, each: RequestState, ready: list[RequestState]) -> None:
        ready.remove(each)
        self._waiting.remove(each)
        each.turn = 0
        self._schedule.begin(each)
        self._running.append(each)

    def _drop_cancelled(self) -> list[Event]:
        if not self._cancelled:
            return []
        cancelled, self._cancelled = self._cancelled, set()
        events: list[Event] = []
        for each in [*self._waiting, *self._running]:
            if each.id in cancelled:
                events.append(Finished(each.id, each.cancel()))
        for each in self._waiting:
            if each.id in cancelled and each.passes:
                self.model.release(each.row)
        self._waiting = [each for each in self._waiting if each.id not in cancelled]
        self._leave([each for each in self._running if each.id in cancelled])
        return events

    def _leave(self, leaving: Sequence[RequestState]) -> None:
        for each in leaving:
            self.model.release(each.row)
            self._running.remove(each)

    def _collect(self) -> list[Event]:
        """Return the events of finished searches. If all running requests are searching, first wait briefly."""
        jobs = [each.job for each in [*self._running, *self._waiting] if each.searches]
        if jobs and all(each.searches for each in self._running):
            wait([job for job in jobs if job is not None], _SEARCH_WAIT, FIRST_COMPLETED)
        tired = time.monotonic() - _SEARCH_TURN
        for each in self._running:
            if each.searches and each.job_began < tired:
                self._schedule.tire(each)
        return self._finished_by([event for each in self._running for event in each.collect()])

    def _encode(self) -> list[Event]:
        """Encode the next chunk of every request whose chunk is due. Return the resulting events."""
        ready = self._to_encode()
        self.model.encode([each.next_chunk() for each in ready])
        events: list[Event] = []
        for each in ready:
            chunk = each.queue.next
            cost = -(-chunk.size * self.model.chunk_steps // self.model.prefill_chunk)
            each.next_encoding = self._clock + cost
            self._schedule.count([each], cost)
            events += each.encoded()
            if chunk.key and self._prefixes is not None:
                self._prefixes.add(each.row, chunk, each.owner)
        return self._finished_by(events)

    def _to_encode(self) -> list[RequestState]:
        """Restore saved chunks, then return the requests whose next chunk must be encoded now. If several have the same
        next chunk, only one is returned; the others will find the chunk in the prefix cache."""
        first: list[RequestState] = []
        taken: set[tuple[str, tuple[bytes, int]]] = set()
        for each in self._running:
            if self._prefixes is not None and (chunks := each.queue.cacheable()):
                each.skip(self._prefixes.fill(each.row, chunks, each.owner))
            if each.queue.empty:
                continue
            if self._prefixes is not None and (sharing := each.queue.sharing) is not None:
                following = (share_of(each.owner), sharing)
                if following in taken:
                    continue
                taken.add(following)
            first.append(each)
        self._clock += 1
        if all(each.waits for each in self._running):
            begins = [each.next_encoding for each in first]
            self._clock = max(self._clock, min(begins, default=0))
        return [each for each in first if each.next_encoding <= self._clock]

    def _denoise(self) -> list[Event]:
        """Run one denoising step of every request whose tokens are all encoded."""
        ready = [each for each in self._running if not each.waits]
        inputs = (each.next_step() for each in ready)
        self._denoised = len(ready)
        self._schedule.count(ready)
        events: list[Event] = []
        with closing(self.model.denoise_each(inputs, len(ready))) as outputs:
            for each, output in zip(ready, outputs, strict=True):
                if output.hidden is not None:
                    check_finite(output.hidden, "hidden states")
                check_finite(output.entropy, "entropies")
                events += each.take(output)
        return self._finished_by(events)

    def _finished_by(self, events: list[Event]) -> list[Event]:
        """Release the finished requests; return `events`."""
        self._leave([each for each in self._running if each.finished])
        return events
