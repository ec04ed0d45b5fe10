"""The mixture of experts by itself: every expert on every token, against slots for the routed ones."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from canvasrt.runtime.engine import Backend, DeviceBackend, EngineCall

CAPACITIES = (32, 48, 64, 128, 160, 256)


class ExpertLayer(Protocol):
    """One layer's experts, ready to run."""

    def run_ms(self, tokens: int, capacity: int, repeats: int) -> float:
        """Return the median milliseconds of a run over `tokens` tokens with `capacity` slots per expert."""
        ...


class HostMixture:
    """Through ONNX Runtime on the CPU."""

    def __init__(self, backend: Backend, file: Path, size: int) -> None:
        self._segment, self._size = backend.open("experts", file), size

    def run_ms(self, tokens: int, capacity: int, repeats: int) -> float:
        feeds: dict[str, np.ndarray] = {
            "x": np.random.default_rng(0).standard_normal((tokens, self._size), np.float32),
            "slots": np.arange(capacity, dtype=np.int64),
        }
        took = []
        for _ in range(1 + repeats):
            begin = time.perf_counter()
            self._segment.run(feeds)
            took.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(took[1:])


class DeviceMixture:
    """On a device, timed by the device's events."""

    def __init__(
        self, backend: DeviceBackend, file: Path, size: int, most: int, profiles: Any = None
    ) -> None:
        """Take memory for runs of at most `most` tokens."""
        self._device: Any = backend.device
        self._engine = backend.open_engine("experts", file, profiles)
        self._engine.prepare()
        self._size = size
        dtype = self._engine.inputs["x"]
        x = np.random.default_rng(0).standard_normal((most, size), np.float32).astype(dtype)
        slots = np.arange(most, dtype=np.int64)
        self._addresses = {
            "x": self._device.allocate(x.nbytes),
            "slots": self._device.allocate(slots.nbytes),
            "mixed": self._device.allocate(x.nbytes),
            "load": self._device.allocate(8),
        }
        self._device.upload(self._addresses["x"], x)
        self._device.upload(self._addresses["slots"], slots)
        self._device.synchronize()

    def run_ms(self, tokens: int, capacity: int, repeats: int) -> float:
        states = (tokens, self._size)
        shapes = {"x": states, "slots": (capacity,), "mixed": states, "load": ()}
        call = EngineCall({"tokens": tokens, "capacity": capacity}, shapes, self._addresses, True)
        marks = []
        for _ in range(3 + repeats):
            begin = self._device.clock()
            self._engine.launch(call)
            marks.append((begin, self._device.clock()))
        self._device.synchronize()
        return statistics.median([1e3 * self._device.elapsed(*pair) for pair in marks][3:])


def measure_experts(mixture: ExpertLayer, tokens: int, repeats: int) -> dict[str, float]:
    """Return milliseconds of one layer's experts by slots per expert; `dense` is one slot for every token."""
    found = {
        str(capacity): mixture.run_ms(tokens, capacity, repeats)
        for capacity in CAPACITIES
        if capacity < tokens
    }
    return found | {"dense": mixture.run_ms(tokens, tokens, repeats)}
