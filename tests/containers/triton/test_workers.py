"""Several GPUs behind one queue, with fake devices."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from canvasrt.containers.triton.tickets import Busy
from canvasrt.containers.triton.workers import Workers
from canvasrt.errors import EngineError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Event, Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.callers import Caller, submit
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import Pair
from tests.helpers.resident import body_profiles
from tests.helpers.serving import eventually


@pytest.fixture(scope="module")
def opened(tiny: Pair) -> list[Model]:
    backends = [FakeBackend(body_profiles(), rows_apart=True) for _ in range(2)]
    return [open_model(tiny.graphs, check=False, backend=each) for each in backends]


@pytest.fixture
def models(opened: list[Model]) -> Iterator[list[Model]]:
    yield opened
    gc.collect()  # frees the slots of closed workers


def request(model: Model, seed: int, owner: str = "", **options: Any) -> Request:
    given = {"max_new_tokens": 4, "max_denoising_steps": 2, "seed": seed} | options
    params = SamplingParams.from_defaults(model.sampler, model.config, **given)
    return Request([2, 5, 6 + seed], params, owner=owner)


def workers_of(
    models: list[Model],
    beat: Callable[[float], None] = lambda since: None,
    max_batch: int = 4,
    kinds: Sequence[type[Generator]] = (Generator, Generator),
) -> Workers:
    pairs = zip(models, kinds, strict=True)
    makes = [lambda model=model, kind=kind: kind(model, max_batch) for model, kind in pairs]
    return Workers(makes, lambda generators, in_flight: None, beat, lambda error: None, 100)


def ask(workers: Workers, wanted: list[Request]) -> list[Caller]:
    callers = [Caller() for _ in wanted]
    for each, caller in zip(wanted, callers, strict=True):
        submit(workers, each, caller)
    return callers


def check_tokens(callers: list[Caller], alone: list[Result]) -> None:
    """Check that every caller gets the tokens that its request gets when it runs alone."""
    for caller, result in zip(callers, alone, strict=True):
        assert caller.ends.get(timeout=60).token_ids == result.token_ids


def test_tokens_of_a_seed_are_the_same_whichever_gpu_takes_them(models: list[Model]) -> None:
    wanted = [request(models[0], seed) for seed in range(6)]
    alone = Generator(models[1]).run(wanted)
    before = [each.counters.denoise_passes for each in models]
    workers = workers_of(models)
    check_tokens(ask(workers, wanted), alone)
    workers.close()
    passes = [each.counters.denoise_passes - n for each, n in zip(models, before, strict=True)]
    assert all(passes)


def test_limits_hold_for_all_gpus_together(models: list[Model]) -> None:
    workers = workers_of(models)
    held = threading.Event()
    caller = Caller()
    caller.event = lambda event: held.wait(30)  # type: ignore[method-assign]
    for seed in range(14):  # seven tokens each
        submit(workers, request(models[0], seed), caller)
    with pytest.raises(Busy, match="tokens of at most 100"):
        submit(workers, request(models[0], 14), Caller())
    held.set()
    assert eventually(lambda: not len(workers.all[0].tickets))
    workers.close()


def test_a_gpu_with_a_place_takes_what_waits_for_another(
    models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long request occupies one GPU, since requests are never parked in this test. The other GPU takes all others."""
    monkeypatch.setattr(DeviceModel, "quantum", 10**6)
    wanted = [request(models[0], seed) for seed in range(6)]
    before = models[1].counters.denoise_passes
    alone = Generator(models[1], 1).run(wanted)
    took, before = models[1].counters.denoise_passes - before, models[1].counters.denoise_passes
    workers = workers_of(models, max_batch=1)
    (long,) = ask(workers, [request(models[0], 7, max_denoising_steps=10**4, early_stop=False)])
    check_tokens(ask(workers, wanted), alone)
    assert long.ends.empty()
    assert models[1].counters.denoise_passes - before == took
    workers.close()


def test_callers_wait_on_every_gpu_alike(models: list[Model]) -> None:
    """A caller's requests are distributed evenly over the GPUs, however many requests other callers have there."""
    workers = workers_of(models, max_batch=1)
    held, callers = threading.Event(), [Caller() for _ in range(9)]
    for caller in callers:
        ends = caller.event
        caller.event = lambda event, ends=ends: held.wait(30) and ends(event)  # type: ignore[method-assign, misc]
    # One caller gets three more requests on the first GPU. The second GPU does not take them, since it is busy.
    submit(workers.all[1], request(models[0], 0, owner="a"), callers.pop())
    assert eventually(lambda: bool(workers.all[1]._known))
    for seed in range(4):
        submit(workers.all[0], request(models[0], seed, owner="a"), callers.pop())
    assert [each.count("a") for each in workers.all] == [4, 1]
    others = list(callers)
    for seed, caller in enumerate(others):
        submit(workers, request(models[0], seed, owner="b"), caller)
    # The load does not include a request that a worker is just admitting.
    assert eventually(lambda: [each.load for each in workers.all] == [6, 3])
    held.set()
    for caller in others:
        assert caller.ends.get(timeout=60).token_ids
    workers.close()


def test_a_gpu_that_hangs_is_not_hidden_by_another(models: list[Model]) -> None:
    beats: list[float] = []
    workers = workers_of(models, beats.append)
    hangs = threading.Event()
    caller = Caller()
    caller.event = lambda event: hangs.wait(60)  # type: ignore[method-assign]
    submit(workers, request(models[0], 0), caller)
    assert eventually(lambda: bool(workers.all[0]._known))
    assert eventually(lambda: len(beats) > 3 and beats[-1] == beats[-2])
    begun = time.monotonic()
    assert eventually(lambda: len(beats) > 3 and beats[-1] == beats[-3] < begun)
    hangs.set()
    workers.close()


@pytest.mark.parametrize("pass_number", [1, 5])
def test_a_gpu_that_fails_costs_only_its_batch(models: list[Model], pass_number: int) -> None:
    passes, fails = count(1), threading.Event()

    class Fails(Generator):
        def _denoise(self) -> list[Event]:
            if self._running and next(passes) == pass_number:
                fails.set()
                raise MemoryError("on purpose")
            return super()._denoise()

    class Waits(Generator):
        """A generator that waits, so that the other GPU gets enough requests."""

        def _denoise(self) -> list[Event]:
            fails.wait(60)
            return super()._denoise()

    wanted = [request(models[0], seed, f"caller {seed % 3}") for seed in range(12)]
    alone = Generator(models[0], 1).run(wanted)
    workers = workers_of(models, max_batch=2, kinds=(Waits, Fails))
    ends = [caller.ends.get(timeout=60) for caller in ask(workers, wanted)]
    failed = [each for each in ends if isinstance(each, EngineError)]
    assert 1 <= len(failed) <= 2
    for end, result in zip(ends, alone, strict=True):
        assert end in failed or end.token_ids == result.token_ids
    workers.close()


def test_callers_avoid_a_gpu_that_stalls(
    models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.containers.triton.worker.STUCK", 1000.0)
    wanted = [request(models[0], seed) for seed in range(9)]
    alone = Generator(models[1], 1).run(wanted)
    workers = workers_of(models)
    stalls, goes_on, stuck = threading.Event(), threading.Event(), Caller()
    stuck.event = lambda event: stalls.set() or goes_on.wait(60)  # type: ignore[method-assign, func-returns-value]
    submit(workers, request(models[0], 9), stuck)
    assert stalls.wait(60)
    workers.all[0].beaten -= 1000.0
    check_tokens(ask(workers, wanted), alone)
    goes_on.set()
    workers.close()


def test_gpus_whose_passes_are_all_slow_are_alike(
    models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.containers.triton.worker.STUCK", -1.0)
    workers = workers_of(models)
    goes_on, caller = threading.Event(), Caller()
    caller.event = lambda event: goes_on.wait(60)  # type: ignore[method-assign]
    for seed in range(10):
        submit(workers, request(models[0], seed), caller)
    assert eventually(lambda: [each.load for each in workers.all] == [5, 5])
    goes_on.set()
    workers.close()
