"""Continuous batching, step by step: requests at different blocks and steps share a loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing

import numpy as np

from canvasrt.defaults import MAX_BATCH
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.active import ActiveRequest
from canvasrt.runtime.answers.constrained import ActiveConstrained, ConstrainedRequest
from canvasrt.runtime.answers.infill import ActiveInfill, GapRequest
from canvasrt.runtime.answers.read import ActiveRead, ReadRequest
from canvasrt.runtime.model import Model
from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.prefix import PrefixCache, share_of
from canvasrt.runtime.request import Block, Draft, Event, Finished, Request, Result, Settled
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.schedule import Schedule
from canvasrt.runtime.scored import ActiveScored, check_scores

__all__ = [
    "Block",
    "Draft",
    "Event",
    "Finished",
    "Generator",
    "Request",
    "Result",
    "Settled",
    "Work",
]

Active = ActiveRequest | ActiveRead | ActiveConstrained | ActiveInfill
Work = Request | ReadRequest | ConstrainedRequest | GapRequest  # what a generator runs
_SEARCH_WAIT = 0.05  # seconds, when nothing but searches is under way


class Generator:
    """Runs requests over one model, up to `max_batch` at a time, or fewer if the engines take
    fewer.

    The others wait; places are shared as `Schedule` says. `add` and `cancel` may be called from other threads while one thread
    calls `step`.
    """

    def __init__(
        self, model: Model, max_batch: int = MAX_BATCH, prefixes: PrefixCache | None = None
    ) -> None:
        """With `prefixes`, the beginnings that prompts share are encoded once."""
        if max_batch < 1:
            raise CanvasError(f"max_batch is {max_batch}", "give at least 1")
        self.model = model
        self.max_batch = min(max_batch, model.max_batch or max_batch)
        self._arrived: deque[Active] = deque()  # filled by other threads
        self._waiting: list[Active] = []
        self._running: list[Active] = []
        self._schedule = Schedule(model.quantum)
        self._cancelled: set[int] = set()
        self._next_id = 0
        self._denoised = 0
        self._prefixes = prefixes

    @property
    def idle(self) -> bool:
        """True if no request is waiting or running."""
        return not (self._arrived or self._waiting or self._running)

    @property
    def active_canvases(self) -> int:
        """The rows of the last denoising pass whose requests are still running."""
        return min(self._denoised, len(self._running))

    @property
    def running(self) -> set[int]:
        """The ids of the requests that have a place in the batch."""
        return {each.id for each in self._running}

    def check(self, request: Work) -> None:
        """Raise CanvasError for a request that can never run. Callable from any thread."""
        request.validate(self.model.config, self.model.max_context)
        if isinstance(request, (Request, ReadRequest)) and request.pictures:
            self.model.check_sight(request.pictures)
        if not isinstance(request, ReadRequest):
            self.model.check_canvas(request.params.canvas(self.model.config))
        if isinstance(request, Request) and request.params.scores:
            check_scores(self.model)
        if isinstance(request, Request) and request.conditions and request.conditions.restricts:
            self.model.host_head.check_signal("leave out canvas.pin and canvas.allow")
        if isinstance(request, Request) and request.params.on_host:
            names = " and ".join(request.params.on_host)
            self.model.host_head.check_signal(f"leave out {names}")

    def add(self, request: Work, is_checked: bool = False) -> int:
        """Queue a request and return its id. Checks it unless the caller has."""
        if not is_checked:
            self.check(request)
        id = self._next_id
        self._next_id += 1
        self._arrived.append(_activate(id, request, self.model))
        return id

    def cancel(self, id: int) -> None:
        """End a request at the next `step`, with the blocks that it has finished by then."""
        self._cancelled.add(id)

    def step(self) -> list[Event]:
        """Run at most one encoding and one denoising pass over the running requests; return their
        events.

        Each step encodes one chunk of a long prompt, so it delays the others by only one chunk.
        """
        self._take_arrived()
        events = self._drop_cancelled()
        self._give_places()
        events += self._collect()
        self._give_places()  # what has just been searched for can make room
        events += self._encode()
        events += self._denoise()
        self._leave([each for each in self._running if each.finished])
        return events

    def abandon(self) -> None:
        """Release everything after a failed pass; the generator is not used again.

        Raises EngineError when the device can run no other pass.
        """
        self.model.check_device()
        for each in self._running:
            self.model.release(each.row)
        self._running.clear()
        self._waiting.clear()
        self._arrived.clear()

    def run(self, requests: Sequence[Work]) -> list[Result]:
        """Run requests to their end; return results in the order of `requests`."""
        ids = [self.add(request) for request in requests]
        results: dict[int, Result] = {}
        while not self.idle:
            for event in self.step():
                if isinstance(event, Finished):
                    results[event.id] = event.result
        return [results[id] for id in ids]

    def probe(self) -> None:
        """Run a shortest request of its own. Raises what its passes raise."""
        params = SamplingParams.from_defaults(
            self.model.sampler, self.model.config, max_new_tokens=1, max_denoising_steps=1
        )
        self.run([Request([0], params)])

    def stream(self, request: Request) -> Iterator[Event]:
        """Yield one request's events as they happen. Leaving the iteration early cancels the
        request."""
        id = self.add(request)
        done = False
        try:
            while not done:
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
            self._schedule.join(fresh.owner, [*self._waiting, *self._running])
            self._waiting.append(fresh)

    def _give_places(self) -> None:
        """Fill the batch, and let requests that wait take turns with those that ran for long."""
        while self._waiting and len(self._running) < self.max_batch:
            self._place(self._schedule.next(self._waiting))
        while (pair := self._schedule.swap(self._waiting, self._running)) is not None:
            best, worst = pair
            worst.park()
            self._running.remove(worst)
            self._waiting.append(worst)
            self._place(best)

    def _place(self, each: Active) -> None:
        self._waiting.remove(each)
        each.turn = 0
        self._running.append(each)

    def _drop_cancelled(self) -> list[Event]:
        if not self._cancelled:
            return []
        cancelled, self._cancelled = self._cancelled, set()
        events: list[Event] = []
        for each in [*self._waiting, *self._running]:
            if each.id in cancelled:
                events.append(Finished(each.id, each.result("cancelled")))
        for each in self._waiting:
            if each.id in cancelled and each.passes:
                self.model.release(each.row)
        self._waiting = [each for each in self._waiting if each.id not in cancelled]
        self._leave([each for each in self._running if each.id in cancelled])
        return events

    def _leave(self, leaving: Sequence[Active]) -> None:
        for each in leaving:
            self.model.release(each.row)
            self._running.remove(each)

    def _collect(self) -> list[Event]:
        """Return the events of finished searches; wait for one if no pass could run otherwise."""
        searching = {id(e): e.job for e in self._running if isinstance(e, ActiveConstrained)}
        jobs = [job for job in searching.values() if job is not None]
        if jobs and all(searching.get(id(each)) for each in self._running):
            wait(jobs, _SEARCH_WAIT, FIRST_COMPLETED)
        events: list[Event] = []
        for each in self._running:
            if isinstance(each, ActiveConstrained):
                events += each.collect()
        self._leave([each for each in self._running if each.finished])
        return events

    def _encode(self) -> list[Event]:
        """Encode one chunk of every request that has tokens to encode. Return the events of blocks
        that this gave their scores."""
        ready = self._to_encode()
        inputs = [each.next_chunk() for each in ready]
        self.model.encode(inputs)
        self._schedule.count(ready)
        for each, item in zip(ready, inputs, strict=True):
            chunk = each.encoded(len(item.tokens))
            if chunk and self._prefixes is not None:
                self._prefixes.add(each.row, chunk, each.owner)
        scored = [each for each in ready if isinstance(each, ActiveScored)]
        events = [event for each in scored for event in each.judged()]
        self._leave([each for each in scored if each.finished])
        return events

    def _to_encode(self) -> list[Active]:
        """Return the requests with tokens to encode. Of those with the same chunk, all but one wait
        for the prefix cache to have it."""
        ready: list[Active] = []
        keys: set[tuple[str, bytes]] = set()
        for each in self._running:
            if self._prefixes is not None and each.cacheable:
                each.skip(self._prefixes.fill(each.row, each.cacheable, each.owner))
                share = share_of(each.owner)
                following = {(share, chunk.key) for chunk in each.cacheable[:1]}
                if following & keys:
                    continue
                keys |= following
            if each.pending.size:
                ready.append(each)
        return ready

    def _denoise(self) -> list[Event]:
        """Run one step of every request whose tokens are all encoded."""
        ready = [each for each in self._running if not each.pending.size and not _waits(each)]
        inputs = (each.next_step() for each in ready)
        self._denoised = len(ready)
        self._schedule.count(ready)
        events: list[Event] = []
        with closing(self.model.denoise_each(inputs, len(ready))) as outputs:
            for each, output in zip(ready, outputs, strict=True):
                _check_finite(output)
                events += each.take(output)
        return events


def _waits(each: Active) -> bool:
    """Whether a search must end before the request's next step."""
    return isinstance(each, ActiveConstrained) and each.job is not None


def _activate(id: int, request: Work, model: Model) -> Active:
    added = time.perf_counter()
    if isinstance(request, Request):
        kind = ActiveScored if request.params.scores else ActiveRequest
        return kind(id, request, model, added)
    active: ActiveRead | ActiveInfill | ActiveConstrained
    if isinstance(request, ReadRequest):
        active = ActiveRead(id, request, model, added)
    elif isinstance(request, GapRequest):
        active = ActiveInfill(id, request, model, added)
    else:
        active = ActiveConstrained(id, request, model, added)
    active.owner = request.owner
    return active


def _check_finite(output: DenoiseOutput) -> None:
    """Raise EngineError for an entropy that is not a number: the tokens would be arbitrary."""
    if output.hidden is not None and not np.isfinite(output.hidden).all():
        raise EngineError(
            "the engines returned hidden states that are not finite",
            "check the bundle with `canvasrt verify`, and the GPU's memory with `nvidia-smi -q`",
            fatal=True,
        )
    if not np.isfinite(output.entropy).all():
        bad = np.count_nonzero(~np.isfinite(output.entropy))
        raise EngineError(
            f"the engines returned {bad} non-finite entropies of {output.entropy.size}",
            "check the bundle with `canvasrt verify`, and the GPU's memory with `nvidia-smi -q`",
            fatal=True,
        )
