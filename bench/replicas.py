"""Runs one segment's engine or graph in place of others, with renumbered layers, and times it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from canvasrt.engine_profiles import Profiles
from canvasrt.runtime.engine import Arrays, Engine, EngineCall, Segment

_LAYER = re.compile(r"^((?:past|new)_(?:key|value)_)(\d+)$")


def shifted(name: str, by: int) -> str:
    """Renumber: `past_key_2` by 6 → `past_key_8`. Other names stay."""
    match = _LAYER.match(name)
    return f"{match[1]}{int(match[2]) + by}" if match else name


class ReplicaEngine:
    """An engine whose layers are numbered from `by`."""

    def __init__(self, engine: Engine, number: int, by: int) -> None:
        self._engine, self._by = engine, by
        self.name = f"body_{number}"
        self.inputs = {shifted(name, by): dtype for name, dtype in engine.inputs.items()}
        self.outputs = {shifted(name, by): dtype for name, dtype in engine.outputs.items()}

    @property
    def profiles(self) -> Profiles:
        return self._engine.profiles

    def prepare(self) -> None:
        self._engine.prepare()

    def launch(self, call: EngineCall) -> None:
        shapes = {shifted(name, -self._by): shape for name, shape in call.shapes.items()}
        addresses = {shifted(name, -self._by): at for name, at in call.addresses.items()}
        self._engine.launch(replace(call, shapes=shapes, addresses=addresses))


class TimedEngine:
    """An engine that records its launches as pairs of device events, while `marks` is a list."""

    def __init__(self, engine: Engine, device: Any) -> None:
        self._engine, self._device = engine, device
        self.marks: list[tuple[int, int]] | None = None
        self.name = engine.name
        self.inputs: Mapping[str, np.dtype] = engine.inputs
        self.outputs: Mapping[str, np.dtype] = engine.outputs

    @property
    def profiles(self) -> Profiles:
        return self._engine.profiles

    def prepare(self) -> None:
        self._engine.prepare()

    def launch(self, call: EngineCall) -> None:
        if self.marks is None:
            self._engine.launch(call)
            return
        begin = self._device.clock()
        self._engine.launch(call)
        self.marks.append((begin, self._device.clock()))


class ReplicaSegment:
    """A graph on the CPU whose layers are numbered from `by` on. It adds up the seconds that it runs."""

    def __init__(self, segment: Segment, name: str, by: int) -> None:
        self._segment, self._by = segment, by
        self.name = name
        self.seconds: list[float] = []
        self.inputs = frozenset(shifted(each, by) for each in segment.inputs)
        self.outputs = tuple(shifted(each, by) for each in segment.outputs)
        self.load = np.zeros(0, np.int64)

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        begin = time.perf_counter()
        fed = {shifted(name, -self._by): array for name, array in feeds.items()}
        names = None if wanted is None else [shifted(name, -self._by) for name in wanted]
        found = self._segment.run(fed, names)
        self.seconds.append(time.perf_counter() - begin)
        self.load = found.get("load", self.load)
        return {shifted(name, self._by): array for name, array in found.items()}
