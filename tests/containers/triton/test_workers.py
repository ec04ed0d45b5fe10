"""Several GPUs behind one queue, on fake devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from canvasrt.containers.triton.tickets import Busy
from canvasrt.containers.triton.workers import Workers
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.callers import Caller, submit
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import Pair, tiny
from tests.helpers.resident import body_profiles
from tests.helpers.serving import eventually

__all__ = ["tiny"]


@pytest.fixture(scope="module")
def models(tiny: Pair) -> list[Model]:
    backends = [FakeBackend(body_profiles(), rows_apart=True) for _ in range(2)]
    return [open_model(tiny.graphs, check=False, backend=each) for each in backends]


def request(model: Model, seed: int) -> Request:
    params = SamplingParams.from_defaults(
        model.sampler, model.config, max_new_tokens=4, max_denoising_steps=2, seed=seed
    )
    return Request([2, 5, 6 + seed], params)


def workers_of(models: list[Model], beat: Callable[[float], None] = lambda since: None) -> Workers:
    makes = [lambda model=model: Generator(model) for model in models]
    return Workers(makes, lambda generators, in_flight: None, beat, lambda error: None, 100)


def test_tokens_of_a_seed_are_the_same_whichever_gpu_takes_them(models: list[Model]) -> None:
    wanted = [request(models[0], seed) for seed in range(6)]
    alone = Generator(models[1]).run(wanted)
    before = [each.counters.denoise_passes for each in models]
    workers = workers_of(models)
    callers = [Caller() for _ in wanted]
    for each, caller in zip(wanted, callers, strict=True):
        submit(workers, each, caller)
    for caller, result in zip(callers, alone, strict=True):
        assert caller.ends.get(timeout=60).token_ids == result.token_ids
    workers.close()
    passes = [each.counters.denoise_passes - n for each, n in zip(models, before, strict=True)]
    assert all(passes)


def test_limits_hold_for_all_gpus_together(models: list[Model]) -> None:
    workers = workers_of(models)
    held = threading.Event()
    caller = Caller()
    caller.event = lambda event: held.wait(30)  # type: ignore[method-assign]
    for seed in range(14):  # of seven tokens each
        submit(workers, request(models[0], seed), caller)
    with pytest.raises(Busy, match="tokens are waiting, of 100 at most"):
        submit(workers, request(models[0], 14), Caller())
    held.set()
    assert eventually(lambda: not len(workers.all[0].tickets))
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
