"""Estimates the memory and disk that a build takes on this machine, before it starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt.build.calibration import CalibrationNeeds
from canvasrt.build.experts import Experts
from canvasrt.build.memory import ENGINE_CODE, Weights
from canvasrt.errors import CanvasError
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.machine import available_bytes

# A builder's memory without weights in bytes, and its minimum bytes per byte of a segment's weights. Measured with
# TensorRT-RTX; docs/benchmarks.md lists the peaks of whole builds.
BUILDER_BASE = 600 * 10**6
BUILDER_FACTOR, HEAD_FACTOR = 2.6, 3.2
# Parallel builders use a third of the free memory. The rest is for the page cache.
SHARE = 3


# The hint for a build that does not fit.
LIGHTER = (
    "take less to build: a checkpoint that is quantized already (nvidia/diffusiongemma-26B-A4B-it-NVFP4), --precision int4,"
    " which needs no calibration, or fewer or shorter prompts with --calibration"
)


@dataclass(frozen=True)
class Needs:
    """A build's needs in bytes: peak `memory`; `segments`, the builder's memory by segment; `graphs` and `engines` on
    disk; `written`, the size by engine."""

    segments: Mapping[str, int]
    graphs: int
    engines: int
    written: Mapping[str, int]
    calibration: CalibrationNeeds | None = None

    @property
    def building(self) -> int:
        """The bytes of the largest builder process."""
        return max(self.segments.values(), default=0)

    @property
    def memory(self) -> int:
        return max(self.building, self.calibration.memory if self.calibration else 0)

    def to_json(self) -> dict[str, Any]:
        """Return what `--dry-run` prints."""
        said = {"memory": self.memory, "graphs": self.graphs, "engines": self.engines}
        return said | ({"calibration": self.calibration.to_json()} if self.calibration else {})


def host_needs(
    built: Weights,
    graphs: Iterable[Weights],
    experts: Experts,
    calibration: CalibrationNeeds | None = None,
) -> Needs:
    """Return the needs of a build with an empty cache, which first calibrates and writes `graphs`."""
    engines, sizes = 0, built.segments()
    if not built.on_cpu:
        engines = sum(sizes.values()) + ENGINE_CODE * len(sizes)
    elif built.precision not in PLAIN:
        # A CPU's engines are links to the graphs, unless weights are widened to float32.
        engines = sum(sizes.values())
    written = sum(sum(each.segments().values()) for each in graphs)
    builders = {} if built.on_cpu else builder_needs(built, experts)
    return Needs(builders, written, engines, sizes, calibration)


def builder_needs(weights: Weights, experts: Experts) -> dict[str, int]:
    """Return the builder's memory by segment.

    This is for whole segments; pieces without experts take less.
    """
    kinds = {weights.precision, *(weights.formats or {}).values()}
    sizes = weights.segments(without=experts.outside)
    return {name: builder_memory(name, size, kinds) for name, size in sizes.items()}


def builder_memory(segment: str, weights: int, formats: Iterable[str] = ()) -> int:
    """Return the bytes that building a segment takes, from its weights' bytes and formats."""
    known = [FORMATS[name].builder_factor for name in formats if name in FORMATS]
    factor = HEAD_FACTOR if segment == "head" else max(known, default=BUILDER_FACTOR)
    return BUILDER_BASE + round(weights * factor)


def check_memory_here(segment: str, need: int) -> None:
    """Raise CanvasError if a segment's builder would take more memory than is free."""
    free = available_bytes()
    if need <= free:
        return
    fewer = (
        ""
        if segment == "head"
        else "; --layers-per-segment, given to the export, makes smaller segments"
    )
    raise CanvasError(
        f"building {segment} takes about {gigabytes(need)} of memory, but only {gigabytes(free)} are free",
        f"close other programs, or use a machine with more memory{fewer}",
    )


def check_calibration_memory(needs: CalibrationNeeds) -> None:
    """Raise CanvasError if a calibration would take more memory than is free."""
    if needs.memory > (free := available_bytes()):
        raise CanvasError(
            f"calibrating takes about {gigabytes(needs.memory)} of memory, but only {gigabytes(free)} are free",
            f"close other programs, or {LIGHTER}",
        )


def check_disk(needed: Mapping[Path, int]) -> None:
    """Raise CanvasError if the disks of folders have less free space than needed. `needed`: bytes by folder."""
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
