"""Reads the current state of this machine's GPUs from NVIDIA's management library. Unavailable values are omitted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from canvasrt import machine


class Gauge(NamedTuple):
    """One number that describes a GPU's state. `read` takes the library's module and the GPU's handle."""

    about: str
    read: Callable[[Any, Any], float]


GAUGES = {
    "utilization_ratio": Gauge(
        "Share of the time in which a kernel ran",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "memory_used_bytes": Gauge(
        "GPU memory in use, by all processes",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    "memory_total_bytes": Gauge(
        "GPU memory", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total
    ),
    "power_watts": Gauge(
        "Power that the GPU draws", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
    ),
    "sm_clock_hertz": Gauge(
        "Clock of the multiprocessors",
        lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6,
    ),
    "memory_clock_hertz": Gauge(
        "Clock of the GPU's memory",
        lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1e6,
    ),
}


def readings() -> dict[str, dict[str, float]]:
    """Return each GPU's available gauges by name, keyed by the GPU's UUID; empty if there are no GPUs."""
    nvml, found = _library(), {}
    for gpu in machine.gpus() if nvml else ():
        values = {}
        for name, gauge in GAUGES.items():
            # The GPU may not support this gauge, or may have been lost.
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                values[name] = float(gauge.read(nvml, handle))
        found[gpu.uuid] = values
    return found


@cache
def _library() -> Any:
    """Return the library's module, initialized; None if the module or the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # a broken driver must not stop a report
        return None
    return pynvml
