"""Estimates, before a build starts, the memory and disk that it takes on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canvasrt.build.calibration_needs import CalibrationNeeds
from canvasrt.build.expert_forms import Experts
from canvasrt.build.memory import ENGINE_CODE, Weights
from canvasrt.checkpoints.weight_names import DOWN, GATE_UP, TABLE, matrices
from canvasrt.errors import CanvasError
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.machine import available_bytes
from canvasrt.targets import Target

# A builder takes `BUILDER_BASE` bytes plus the size of a segment's weights times a factor. If the weights' format has
# no factor of its own, this is `HEAD_FACTOR` for the head and `BUILDER_FACTOR` for other segments. Measured in
# TensorRT-RTX; docs/benchmarks.md lists the peaks of whole builds.
BUILDER_BASE = 600 * 10**6
BUILDER_FACTOR, HEAD_FACTOR = 2.6, 3.2
# Parallel builders together use at most a third of the free memory. The rest is for the page cache.
SHARE = 3
# Bytes of memory that this process takes after importing torch and ModelOpt.
_PROCESS = 850 * 10**6
# In export/, this many bytes of a weight are read at a time, and this many rows of a matrix are quantized at a time.
CHUNK, ROWS = 1 << 26, 16_384

# The hint for a build that does not fit.
LIGHTER = (
    "choose a smaller build: from a checkpoint that is already quantized"
    " (nvidia/diffusiongemma-26B-A4B-it-NVFP4), with --precision int4, which needs no calibration, or with fewer or"
    " shorter prompts for --calibration"
)


@dataclass(frozen=True)
class Needs:
    """The memory and disk that a build needs, in bytes.

    Attributes:
        segments: for every segment, the memory of its builder.
        quantizing: the memory that writing graphs takes.
        graph_files, engine_files: for every segment, the size of its files on disk.
        table: the size of the embedding table. The table stays on disk when the head's other weights are removed.
        workers: the largest number of builders that run at once.
    """

    segments: Mapping[str, int]
    quantizing: int
    graph_files: Mapping[str, int]
    engine_files: Mapping[str, int]
    table: int = 0
    workers: int = 1
    calibration: CalibrationNeeds | None = None

    @property
    def building(self) -> int:
        """The memory of the largest builder process."""
        return max(self.segments.values(), default=0)

    @property
    def writing(self) -> int:
        """The memory that calibrating and writing graphs take."""
        return max(self.quantizing, self.calibration.memory if self.calibration else 0)

    @property
    def memory(self) -> int:
        together = sum(self.segments[name] for name in self._first_builders())
        return max(self.writing, _PROCESS + together)

    @property
    def graphs(self) -> int:
        return sum(self.graph_files.values())

    @property
    def engines(self) -> int:
        return sum(self.engine_files.values())

    def disk(self, spends_graphs: bool) -> int:
        """Return the peak disk use in bytes. A calibration's files are removed before graphs are written. If
        `spends_graphs` is true, the weights in a segment's graph are removed once the segment's engine is built."""
        most = self.calibration.disk if self.calibration else 0
        if not spends_graphs:
            return max(most, self.graphs + self.engines)
        order = sorted(self.engine_files, key=lambda name: -self.segments.get(name, 0))
        together = max(1, len(self._first_builders()))
        held = self.graphs
        for place, name in enumerate(order):
            running = sum(self.engine_files[each] for each in order[place : place + together])
            most = max(most, held + running)
            held += self.engine_files[name] - self.graph_files.get(name, 0)
            held += self.table if name == "head" else 0
        return most

    def left(self, built: Collection[str]) -> Needs:
        """Return what a build still needs once its graphs are written and its `built` segments are in the cache."""
        graphs, engines = (
            {name: size for name, size in files.items() if name not in built}
            for files in (self.graph_files, self.engine_files)
        )
        return replace(self, calibration=None, graph_files=graphs, engine_files=engines)

    def _first_builders(self) -> list[str]:
        """Return the segments whose builders start first and run at the same time (build/parallel.py)."""
        first: list[str] = []
        left = available_bytes() // SHARE
        for name in sorted(self.segments, key=lambda each: -self.segments[each]):
            if not first or (self.segments[name] <= left and len(first) < self.workers):
                first.append(name)
                left -= self.segments[name]
        return first

    def to_json(self) -> dict[str, Any]:
        """Return what `--dry-run` prints."""
        said = {"memory": self.memory, "graphs": self.graphs, "engines": self.engines}
        return said | ({"calibration": self.calibration.to_json()} if self.calibration else {})


def host_needs(
    built: Weights,
    graphs: Weights | None,
    experts: Experts,
    workers: int = 1,
    calibration: CalibrationNeeds | None = None,
) -> Needs:
    """Return what a build needs if the cache is empty. `graphs` are the weights of the graphs that the build writes
    first; None if it builds from the source's own graphs."""
    engines: dict[str, int] = {}
    stored = replace(built, in_files=True).segments()
    if not built.on_cpu:
        engines = {name: size + ENGINE_CODE for name, size in built.segments().items()}
    elif built.precision not in PLAIN:
        # A CPU's engines take disk space only if they are lowered from quantized graphs. Otherwise they are links.
        engines = stored
    return Needs(
        {} if built.on_cpu else builder_needs(built, experts),
        _PROCESS if graphs is None else _PROCESS + _quantizing(graphs),
        {} if graphs is None else graphs.segments(),
        engines,
        0 if graphs is None else graphs.table,
        workers,
        calibration,
    )


def _quantizing(graphs: Weights) -> int:
    """Return how much memory quantizing the largest weights takes: two pieces, each as read and in float32; two float32
    matrices; their codes; and the codes of earlier experts, whose memory the allocator keeps."""
    pieces = matrix = 0
    experts, others = 0.0, 0.0
    for name, each in matrices(graphs.model).items():
        pieces = max(pieces, 3 * min(2 * each.size, 2 * CHUNK))
        format = FORMATS.get(graphs.chosen.get(name, ""))
        codes = each.size * format.weight_bytes(each.width) if format else 0.0
        if name.endswith((GATE_UP, DOWN)):
            experts, size = max(experts, codes), each.size // graphs.model.num_experts
        else:
            others, size = max(others, codes), min(each.size, ROWS * each.width)
        matrix = max(matrix, 8 * size if codes else 0)
    return round(pieces + matrix + experts + max(experts, others))


def builders_at_once(target: Target) -> int:
    """Return how many engines can be built at once: only one if builders time kernels on the GPU."""
    return len(os.sched_getaffinity(0)) if target.builds_anywhere else 1


def builder_needs(weights: Weights, experts: Experts) -> dict[str, int]:
    """Return the builder's memory by segment, as if segments were built whole; single pieces take less."""
    kinds = {weights.precision, *(weights.formats or {}).values()}
    head = {weights.chosen.get(TABLE, weights.base)}
    sizes = weights.segments(without=experts.outside)
    return {
        name: builder_memory(name, size, head if name == "head" else kinds)
        for name, size in sizes.items()
    }


def builder_memory(segment: str, weights: int, formats: Iterable[str] = ()) -> int:
    """Return how many bytes of memory building a segment takes. `weights` is its weights' size in bytes."""
    known = [FORMATS[name].builder_factor for name in formats if name in FORMATS]
    least = HEAD_FACTOR if segment == "head" else BUILDER_FACTOR
    return BUILDER_BASE + round(weights * max(known, default=least))


def check_memory_here(segment: str, need: int) -> None:
    """Raise CanvasError if a segment's builder would take more memory than is free."""
    free = available_bytes()
    if need <= free:
        return
    fewer = (
        ""
        if segment == "head"
        else "; a smaller --layers-per-segment in the export makes smaller segments"
    )
    raise CanvasError(
        f"building {segment} takes about {gigabytes(need)} of memory, but only {gigabytes(free)} are free",
        f"close other programs, or use a machine with more memory{fewer}",
    )


def check_memory_to_write(needs: Needs) -> None:
    """Raise CanvasError if calibrating or quantizing would take more memory than is free."""
    if needs.writing > (free := available_bytes()):
        calibrates = needs.calibration and needs.calibration.memory == needs.writing
        raise CanvasError(
            f"{'calibrating' if calibrates else 'writing graphs'} takes about {gigabytes(needs.writing)} of memory, but only"
            f" {gigabytes(free)} are free",
            f"close other programs, or {LIGHTER}",
        )


def check_disk(needed: Mapping[Path, int]) -> None:
    """Raise CanvasError if a disk has less free space than needed. `needed`: how many bytes each folder needs."""
    disks: dict[int, tuple[Path, int]] = {}
    for folder, count in needed.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        device = there.stat().st_dev
        disks[device] = (there, disks.get(device, (there, 0))[1] + count)
    for there, count in disks.values():
        free = shutil.disk_usage(there).free
        if count > free:
            raise CanvasError(
                f"the build writes about {gigabytes(count)} to the disk of {there},"
                f" but only {gigabytes(free)} are free there",
                f"free space there, name another disk with -o and CANVASRT_CACHE, or {LIGHTER}",
            )


def same_disk(one: Path, other: Path) -> bool:
    """Return whether two folders are on the same disk. They need not exist."""
    devices = [
        os.stat(next(path for path in (folder, *folder.parents) if path.exists())).st_dev
        for folder in (one.resolve(), other.resolve())
    ]
    return devices[0] == devices[1]


def gigabytes(count: int) -> str:
    """Format a number of bytes for a message."""
    return f"{count / 1e9:.1f} GB"
