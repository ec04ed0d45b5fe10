"""GPU metrics, read through a fake NVML."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from canvasrt import machine, nvml
from canvasrt.cli import doctor
from canvasrt.containers.openai import metrics
from canvasrt.machine import Gpu
from tests.helpers.alone import lone_front

GPU = Gpu("NVIDIA H100", 80 * 10**9, (9, 0), "580.1", "GPU-1")
LOST = Gpu("NVIDIA H100", 80 * 10**9, (9, 0), "580.1", "GPU-2")


class Fake:
    """A fake NVML with two GPUs: the first reports no clocks, and the second is lost."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != GPU.uuid:
            raise self.NVMLError("the GPU is lost")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        return SimpleNamespace(gpu=25, memory=10)

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:
        return SimpleNamespace(used=3 * 10**9, total=80 * 10**9)

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return 71_500

    def nvmlDeviceGetClockInfo(self, gpu: str, kind: int) -> int:
        raise self.NVMLError("not supported")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    made = Fake()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(machine, "gpus", lambda: (GPU, LOST))
    nvml._library.cache_clear()
    yield made
    nvml._library.cache_clear()


def scrape() -> str:
    """Return the metrics of a front end without a server behind it."""
    with lone_front() as front:
        reply = front.get("/v1/metrics")
    assert (reply.status_code, "canvasrt_openai_requests_total" in reply.text) == (200, True)
    return reply.text


def test_what_fails_is_absent(fake: Fake) -> None:
    lines = [each for each in scrape().splitlines() if each.startswith("canvasrt_gpu_")]
    assert lines == [
        'canvasrt_gpu_utilization_ratio{gpu="GPU-1"} 0.25',
        'canvasrt_gpu_memory_used_bytes{gpu="GPU-1"} 3000000000.0',
        'canvasrt_gpu_memory_total_bytes{gpu="GPU-1"} 80000000000.0',
        'canvasrt_gpu_power_watts{gpu="GPU-1"} 71.5',
    ]


def test_clocks_are_in_hertz(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "nvmlDeviceGetClockInfo", lambda gpu, kind: {1: 1980, 2: 2619}[kind])
    found = nvml.readings()[GPU.uuid]
    assert (found["sm_clock_hertz"], found["memory_clock_hertz"]) == (1.98e9, 2.619e9)


def test_doctor_says_what_gpus_do(fake: Fake) -> None:
    known, lost = doctor._gpus()
    assert known.found.endswith("driver 580.1; now 25% busy, 3.0 GB in use, 72 W")
    assert lost.found.endswith("driver 580.1")
    assert (known.state, known.fix) == ("ok", "")


def test_doctor_names_the_driver_that_a_gpu_needs(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (replace(GPU, driver="570.2"),))
    (check,) = doctor._gpus()
    assert (check.state, check.fix) == ("gap", "install NVIDIA's driver 580 or newer")


def test_a_machine_without_the_library_has_no_numbers(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise fake.NVMLError("the driver is not loaded")

    monkeypatch.setattr(fake, "nvmlInit", broken)
    assert nvml.readings() == {}
    assert "canvasrt_gpu" not in scrape()


def test_a_gpu_that_hangs_holds_no_scrape_up(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", lambda gpu: end.wait(60) * 1e3)
    monkeypatch.setattr(metrics, "_LONGEST", 0.1)
    timer = threading.Timer(3, end.set)  # an event loop joins its threads at its end
    timer.start()
    assert "canvasrt_gpu" not in scrape()
    timer.join()
