"""A request's ticket, at every stage: its caller's share of the places, and its time limit."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import canvasrt.containers.triton.worker as worker_module
from canvasrt.containers.triton.tickets import Busy, Late
from canvasrt.containers.triton.worker import Worker
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from tests.helpers.callers import Caller, submit
from tests.helpers.one_caller import model, request
from tests.helpers.serving import eventually

__all__ = ["model"]


def test_one_key_cannot_take_every_place(model: Model, monkeypatch: pytest.MonkeyPatch):
    """This holds wherever the key's requests are: still being prepared, queued, or in the generator."""
    monkeypatch.setattr(worker_module, "MAX_WAITING", 8)
    worker = Worker(lambda: Generator(model, max_batch=1))
    one = replace(request(model, **LONG), owner="a")
    preparing = [worker.take_ticket("a", Caller()) for _ in range(3)]
    submit(worker, one, Caller())
    for _ in range(2):  # fails at once, and again in the generator
        with pytest.raises(Busy, match="4 requests of this key"):
            worker.take_ticket("a", Caller())
        assert eventually(lambda: len(worker._known) == 1)
    other = Caller()
    submit(worker, replace(request(model), owner="b"), other)
    preparing[0].leave()
    preparing[0].leave()
    worker.take_ticket("a", Caller())
    with pytest.raises(Busy, match="4 requests of this key"):
        worker.take_ticket("a", Caller())
    worker.close()


LONG = {"max_new_tokens": 500, "max_denoising_steps": 100, "stability_threshold": 10_000}


def test_time_that_is_over_is_told_wherever_a_request_is(model: Model):
    """A request may be running, being prepared, or waiting for the place of a running one."""
    worker = Worker(lambda: Generator(model, max_batch=1), timeout=1)
    runs, waits, prepared = Caller(), Caller(), Caller()
    begin = time.monotonic()
    submit(worker, request(model, **LONG | {"max_denoising_steps": 10_000}), runs)
    submit(worker, request(model), waits, begin)
    ticket = worker.take_ticket("", prepared, begin)
    for caller in (prepared, runs):
        assert isinstance(caller.ends.get(timeout=60), Late)
    assert time.monotonic() - begin > 1
    again = Caller()
    worker.submit(request(model), ticket)  # once it is prepared
    assert eventually(lambda: len(worker.tickets) == 0)
    assert isinstance(
        prepared.ends.get(timeout=60), Late
    )  # a sink of Triton's takes the first only
    submit(worker, request(model), again)
    assert again.ends.get(timeout=60).finish_reason == "length"
    worker.close()


def test_an_idle_worker_tells_those_whose_time_is_over(model: Model):
    worker = Worker(lambda: Generator(model), timeout=1)
    caller = Caller()
    worker.take_ticket("", caller)
    assert isinstance(caller.ends.get(timeout=60), Late)
    worker.close()
