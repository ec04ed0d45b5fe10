"""The worker's thread: failing passes, too many requests, and requests that exceed their time limit."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

import canvasrt.containers.triton.worker as worker_module
from canvasrt.containers.triton.failure_limiter import MOST
from canvasrt.containers.triton.tickets import Busy, Late, Overloaded
from canvasrt.containers.triton.worker import ADMITTED, Worker, _Known
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.request import Event, Request
from tests.helpers.callers import Caller, submit
from tests.helpers.one_caller import request
from tests.helpers.serving import ENDLESS, eventually


class Failing(Generator):
    """A generator whose first pass fails, as if the device ran out of memory."""

    passes = 0
    held = threading.Event()
    held.set()

    def _denoise(self) -> list[Event]:
        assert Failing.held.wait(60)
        Failing.passes += 1
        if Failing.passes == 1:
            raise MemoryError("out of memory")
        return super()._denoise()


def arrive(worker: Worker, request: Request, caller: Caller) -> None:
    """Queue a request without the usual checks."""
    ticket = worker.tickets.take(request.owner, caller, time.monotonic())
    worker._arrived.put(_Known(request, ticket))


def test_requests_that_wait_outlive_a_failed_pass(model: Model):
    """Requests that were not in the failed pass get their answers, and their tickets are returned."""
    Failing.passes = 0
    alone = Generator(model).run([request(model, seed=each) for each in range(4)])
    worker = Worker(lambda: Failing(model, max_batch=1), max_tokens=4 * 7)
    Failing.held.clear()  # all requests arrive before the first pass
    callers = [Caller() for _ in range(4)]
    for seed, caller in enumerate(callers):
        submit(worker, request(model, seed=seed), caller)
    Failing.held.set()
    error = callers[0].ends.get(timeout=60)
    assert isinstance(error, EngineError)
    assert error.message == "MemoryError: out of memory"
    for caller, result in zip(callers[1:], alone[1:], strict=True):
        assert caller.ends.get(timeout=60).token_ids == result.token_ids
    worker.close()
    assert worker.tickets.tokens == len(worker.tickets) == 0


def test_requests_join_a_few_at_a_time(model: Model):
    """Joining may take long. Running requests get steps in between, and every step is reported as progress."""
    order: list[str] = []

    class Slow(Generator):
        def add(self, request: Request, is_checked: bool = False) -> int:
            order.append("add")
            return super().add(request, is_checked)

        def step(self) -> list[Event]:
            if order:
                order.append("step")
            return super().step()

    worker = Worker(lambda: Slow(model), beat=lambda: order.append("beat") if order else None)
    callers = [Caller() for _ in range(5 * ADMITTED)]
    held = threading.Event()
    first = Caller()
    first.event = lambda event: held.wait(60)  # type: ignore[method-assign]
    submit(worker, request(model), first)
    for caller in callers:
        submit(worker, request(model), caller)
    order.clear()
    order.append("begin")
    held.set()
    for caller in callers:
        caller.ends.get(timeout=30)
    worker.close()
    rounds = "".join(each[0] for each in order).replace("b", "").split("s")
    assert max(len(each) for each in rounds) == ADMITTED
    assert "aa" not in "".join(each[0] for each in order)


class Panic(BaseException):
    """A panic of a library, which is not an Exception."""


@pytest.mark.parametrize(
    "error", [EngineError("the device is lost", fatal=True), Panic("the device is lost")]
)
def test_a_worker_that_ends_leaves_nobody_waiting(model: Model, error: BaseException):
    class Ends(Generator):
        def step(self) -> list[Event]:
            if self.idle:
                return []
            raise error

    lost: queue.SimpleQueue[EngineError] = queue.SimpleQueue()
    worker = Worker(lambda: Ends(model), lost=lost.put)
    callers = [Caller(), Caller()]
    for caller in callers:
        arrive(worker, request(model), caller)
    assert "the device is lost" in lost.get(timeout=60).message
    for caller in callers:
        assert "the device is lost" in caller.ends.get(timeout=60).message
    with pytest.raises(Overloaded, match="the device is lost"):
        submit(worker, request(model), Caller())
    worker.close()


@pytest.mark.parametrize("error", [OSError("disconnected"), Panic("a library's")])
def test_a_caller_that_cannot_be_reached_is_dropped(model: Model, error: BaseException):
    class Broken(Caller):
        def event(self, event: Event) -> None:
            raise error

    worker = Worker(lambda: Generator(model))
    submit(worker, request(model, **ENDLESS), Broken())
    caller = Caller()
    submit(worker, request(model), caller)
    assert caller.ends.get(timeout=60).finish_reason == "length"
    worker.close()


def test_a_request_that_cannot_run_is_refused(model: Model):
    worker = Worker(lambda: Generator(model))
    caller = Caller()
    submit(worker, request(model, max_new_tokens=4096), caller)
    error = caller.ends.get(timeout=60)
    assert isinstance(error, CanvasError)
    assert "exceed the context" in error.message
    worker.close()


def test_too_many_requests_are_refused_and_all_after_the_end(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_module, "MAX_WAITING", 2)
    worker = Worker(lambda: Generator(model))
    callers = [Caller(), Caller(), Caller()]
    for caller in callers[:2]:
        submit(worker, request(model, **ENDLESS), caller)
    with pytest.raises(Overloaded, match="2 requests are already waiting"):
        submit(worker, request(model), callers[2])
    worker.close()
    for caller in callers[:2]:
        assert isinstance(caller.ends.get(timeout=60), Overloaded)
    with pytest.raises(Overloaded, match="stopping"):
        submit(worker, request(model), Caller())


def test_one_key_cannot_take_every_place(model: Model, monkeypatch: pytest.MonkeyPatch):
    """This holds whether the key's requests are being prepared, queued, or in the generator."""
    monkeypatch.setattr(worker_module, "MAX_WAITING", 8)
    worker = Worker(lambda: Generator(model, max_batch=1))
    one = request(model, "a", max_new_tokens=500, **ENDLESS)
    preparing = [worker.take_ticket("a", Caller()) for _ in range(3)]
    submit(worker, one, Caller())
    for _ in range(2):  # before and after the request reaches the generator
        with pytest.raises(Busy, match="4 requests of this key"):
            worker.take_ticket("a", Caller())
        assert eventually(lambda: len(worker._known) == 1)
    other = Caller()
    submit(worker, request(model, "b"), other)
    preparing[0].leave()
    preparing[0].leave()
    worker.take_ticket("a", Caller())
    with pytest.raises(Busy, match="4 requests of this key"):
        worker.take_ticket("a", Caller())
    worker.close()


def test_time_that_is_over_is_told_wherever_a_request_is(model: Model):
    """The time may end while the request runs, is being prepared, or waits for the place of another request."""
    worker = Worker(lambda: Generator(model, max_batch=1), timeout=1)
    runs, waits, prepared = Caller(), Caller(), Caller()
    begin = time.monotonic()
    submit(worker, request(model, max_new_tokens=500, **ENDLESS), runs)
    submit(worker, request(model), waits, begin)
    ticket = worker.take_ticket("", prepared, begin)
    for caller in (prepared, runs):
        assert isinstance(caller.ends.get(timeout=60), Late)
    assert time.monotonic() - begin > 1
    early = Caller()
    submit(worker, request(model), early, begin)  # time counts from its arrival
    error = early.ends.get(timeout=60)
    assert isinstance(error, Late)
    assert "longer than 1 s" in error.message
    again = Caller()
    worker.submit(request(model), ticket)  # it is prepared now
    assert eventually(lambda: len(worker.tickets) == 0)
    assert isinstance(prepared.ends.get(timeout=60), Late)  # a sink sends only the first end
    submit(worker, request(model), again)
    assert again.ends.get(timeout=60).finish_reason == "length"
    worker.close()


def test_an_idle_worker_forgets_requests_that_never_reach_it(model: Model):
    """Stopping a server waits until the gauge of requests in flight is 0."""
    counts: list[int] = []
    worker = Worker(
        lambda: Generator(model), lambda _, in_flight: counts.append(in_flight), timeout=1
    )
    late = Caller()
    preparing = worker.take_ticket("", late)
    assert eventually(lambda: counts[-1:] == [1])
    assert isinstance(late.ends.get(timeout=60), Late)
    preparing.leave()
    assert eventually(lambda: counts[-1] == 0)
    worker.close()


POISON = 9


class Poisoned(Generator):
    """A generator whose passes fail while a request with the token POISON runs."""

    def _denoise(self) -> list[Event]:
        if any(POISON in each.prompt for each in self._running):  # type: ignore[union-attr]
            raise MemoryError("out of memory")
        return super()._denoise()


def poison(model: Model, owner: str, **options: Any) -> Request:
    return replace(request(model, owner, **options), prompt_token_ids=[2, POISON])


@pytest.mark.parametrize("owner", ["a", ""])
def test_one_caller_s_requests_do_not_end_the_service(
    model: Model, owner: str, monkeypatch: pytest.MonkeyPatch
):
    """This holds however many requests fail. A caller with a key is refused for a while."""
    lost: queue.SimpleQueue[EngineError] = queue.SimpleQueue()
    worker = Worker(lambda: Poisoned(model), lost=lost.put)
    for _ in range(MOST if owner else 2 * MOST):
        caller = Caller()
        submit(worker, poison(model, owner), caller)
        assert isinstance(caller.ends.get(timeout=60), EngineError)
    if owner:
        assert eventually(lambda: worker._limiter.refuses(owner))
        with pytest.raises(Busy, match="with this API key made"):
            submit(worker, poison(model, owner), Caller())
        monkeypatch.setattr(
            "canvasrt.containers.triton.failure_limiter.WINDOW", 0.0
        )  # as if the time were over
    for each in (owner, "b"):
        caller = Caller()
        submit(worker, request(model, each), caller)
        assert caller.ends.get(timeout=60).finish_reason == "length"
    assert lost.empty()
    worker.close()


def test_a_caller_beside_another_s_failures_is_not_blamed(model: Model):
    """The caller's requests share passes with those of the caller who causes the failures. Only the latter's waiting
    requests are refused."""
    worker = Worker(lambda: Poisoned(model, max_batch=2))
    for number in range(MOST):
        victim, bad = Caller(), Caller()
        submit(worker, request(model, "b", max_new_tokens=200, **ENDLESS), victim)
        assert eventually(lambda: any(each.begun for each in list(worker._known.values())))
        waiting = [Caller() for _ in range(6)]
        arrive(worker, poison(model, "a"), bad)
        if number == MOST - 1:
            for each in waiting:
                arrive(worker, poison(model, "a"), each)
        for each in (victim, bad):
            assert isinstance(each.ends.get(timeout=60), EngineError)
    ends = [each.ends.get(timeout=60) for each in waiting]
    assert [isinstance(each, Busy) for each in ends[2:]] == [True] * 4  # two were running
    assert not worker._limiter.refuses("b")
    worker.close()


def test_passes_that_fail_with_the_probe_end_the_service(model: Model):
    """The service ends after three such failures in a row. A pass that succeeds resets the count."""
    left = [0]

    class Broken(Generator):
        def _denoise(self) -> list[Event]:
            if left[0] and self._running:
                left[0] -= 1
                raise MemoryError("out of memory")
            return super()._denoise()

    lost: queue.SimpleQueue[EngineError] = queue.SimpleQueue()
    worker = Worker(lambda: Broken(model), lost=lost.put)
    for failing in (2, 2, 0, 2, 2, 0, 2, 2, 2):  # 2: the request's pass and the probe's
        assert lost.empty()
        caller = Caller()
        left[0] = failing
        submit(worker, request(model), caller)
        assert isinstance(caller.ends.get(timeout=60), EngineError) == bool(failing)
        # The probe runs after the answer is sent.
        assert eventually(lambda: not left[0] or not lost.empty())
    assert "3 passes in a row" in lost.get(timeout=60).message
    worker.close()


def test_a_failed_pass_gives_its_slots_back(model: Model):
    """A device has few slots. If failed passes kept them, the server would soon refuse every request."""
    released: list[Any] = []
    real = model.release
    model.release = lambda row: (released.append(row), real(row))[1]  # type: ignore[method-assign]
    Failing.passes = 0

    class Later(Failing):
        def step(self) -> list[Event]:
            if Failing.passes == 0:
                Generator.step(self)
            return super().step()

    try:
        worker = Worker(lambda: Later(model))
        caller = Caller()
        submit(worker, request(model, max_denoising_steps=100), caller)
        assert isinstance(caller.ends.get(timeout=60), EngineError)
        worker.close()
    finally:
        del model.release  # type: ignore[method-assign]
    assert len(released) == 2  # the request's and the probe's


def test_no_callers_temperature_looks_like_a_broken_engine(model: Model):
    options = {"t_min": 0.0, "max_denoising_steps": 3}
    for t_max in (1e-45, 1e-38, 1e-7):
        with pytest.raises(CanvasError, match="t_max"):
            request(model, t_max=t_max, **options)
    (result,) = Generator(model).run([request(model, t_max=1e-4, **options)])
    assert len(result.token_ids) == 4
