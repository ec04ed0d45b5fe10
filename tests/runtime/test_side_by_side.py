"""On a CPU, passes of a small model run in parallel on threads, which take one pass after another."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from canvasrt.runtime import host_model
from canvasrt.runtime.open import open_model
from tests.helpers.serving import eventually


@pytest.fixture
def model(tiny: Any) -> Any:
    """A model with two threads, whose passes return their input."""
    model: Any = open_model(tiny.bundle, threads=2)
    assert model._pool is not None
    model._denoise_pass = list
    return model


def test_outputs_keep_the_order_of_the_inputs(model: Any) -> None:
    second = threading.Event()

    def first_last(batch: list[int]) -> list[int]:
        assert batch != [0] or second.wait(60)
        second.set()
        return batch

    model._denoise_pass = first_last
    assert model.denoise(range(20)) == list(range(20))
    assert model.counters.denoise_passes == 20


def test_passes_count_although_nobody_takes_their_results(model: Any) -> None:
    outputs = model.denoise_each(iter(range(5)), 5)
    assert next(outputs) == 0
    outputs.close()
    assert model.counters.denoise_passes == 5


def test_what_callers_do_between_outputs_is_not_time_in_passes(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, readings = [0.0], list[float]()

    def clock() -> float:
        readings.append(now[0])
        return now[0]

    monkeypatch.setattr(host_model, "time", SimpleNamespace(perf_counter=clock))
    for _ in model.denoise_each(iter(range(5)), 5):
        assert eventually(lambda: len(readings) == 6, 60)  # the begin, and each pass's end
        now[0] += 1
    assert model.counters.denoise_seconds == 0


def test_a_failure_ends_the_passes_that_wait(model: Any) -> None:
    ran = []

    def fail(batch: list[int]) -> list[int]:
        ran.append(batch)
        time.sleep(0.01)
        raise RuntimeError("the pass failed on purpose")

    model._denoise_pass = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        model.denoise(range(20))
    assert len(ran) <= 2


def test_an_input_that_cannot_be_made_is_no_silence(model: Any) -> None:
    def inputs() -> Any:
        yield 0
        raise RuntimeError("the input failed on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        list(model.denoise_each(inputs(), 3))
