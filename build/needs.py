"""Estimates the memory and disk that a build takes on this machine, before it starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from canvasrt.build import memory
from canvasrt.build.precision import Precision
from canvasrt.build.source import Source
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import DOWN, GATE_UP
from canvasrt.defaults import LAYERS_PER_SEGMENT, MUCH_TO_BUILD, SHORT_SEGMENT
from canvasrt.errors import CanvasError
from canvasrt.formats import FORMATS
from canvasrt.machine import available_bytes

# A builder's memory without weights, and bytes per byte of a segment's weights if no format says
# more. Measured with TensorRT-RTX; docs/benchmarks.md lists the peaks of whole builds.
BUILDER_BASE = 600 * 10**6
BUILDER_FACTOR, HEAD_FACTOR = 2.6, 3.2
# Parallel builders use a third of the free memory. The rest caches the files that they read and write.
SHARE = 3


@dataclass(frozen=True)
class Needs:
    """Bytes: `memory` of the largest builder, `segments` of each builder, `graphs` and `engines` on disk."""

    segments: Mapping[str, int]
    graphs: int
    engines: int

    @property
    def memory(self) -> int:
        return max(self.segments.values(), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return what `--dry-run` prints."""
        return {"memory": self.memory, "graphs": self.graphs, "engines": self.engines}


def host_needs(
    source: Source,
    precision: Precision,
    formats: Mapping[str, str] | None,
    layers_per_segment: int,
    on_cpu: bool,
    sorts_rows: bool = False,
) -> Needs:
    """Return the needs of a build with an empty cache. With `sorts_rows`, the experts' weights are in no engine."""
    built = memory.segment_bytes(source.model, precision.name, layers_per_segment, formats, on_cpu)
    graphs = 0
    if source.graphs is None:
        exported = source.precision or precision.exported
        graphs += _total(source, exported, layers_per_segment, source.formats)
    if precision.is_quantized and not source.is_quantized:
        graphs += _total(source, precision.name, layers_per_segment, formats)
    kinds = {precision.name, *(formats or {}).values()}
    held = built
    if sorts_rows:
        # The largest piece takes less: this is a whole segment without its experts.
        held = memory.segment_bytes(
            source.model, precision.name, layers_per_segment, formats, without=(GATE_UP, DOWN)
        )
    needs = {n: builder_memory(n, size, kinds) for n, size in held.items() if not on_cpu}
    # A CPU's engines are links to its graphs, unless their weights are widened.
    engines = 0 if on_cpu and not precision.is_quantized else sum(built.values())
    engines += 0 if on_cpu else memory.ENGINE_CODE * len(built)
    return Needs(needs, graphs, engines)


def has_short_segments(
    model: ModelConfig,
    precision: Precision,
    formats: Mapping[str, str] | None,
    limit: int | None,
    of: Callable[..., memory.Estimate],
) -> bool:
    """Return whether segments have `SHORT_SEGMENT` layers: if longer ones would take much memory to build, and the
    target has room for short ones, which take some more of its memory.

    A target without a limit has room. Another has it if it is not nearly full then, and prompts are read alike.

    of: the memory that serving takes, by how prompts are read, and `layers` per segment.
    """
    built = memory.segment_bytes(model, precision.name, LAYERS_PER_SEGMENT, formats)
    kinds = {precision.name, *(formats or {}).values()}
    if max(builder_memory(n, size, kinds) for n, size in built.items()) <= MUCH_TO_BUILD:
        return False
    long, short = (
        memory.reading(model, limit, partial(of, layers=layers))
        for layers in (LAYERS_PER_SEGMENT, SHORT_SEGMENT)
    )
    return limit is None or (
        long == short and of(short, layers=SHORT_SEGMENT).total <= 0.95 * limit
    )


def builder_memory(segment: str, weights: int, formats: Iterable[str] = ()) -> int:
    """Return the memory to build a segment, from the bytes of its weights and their formats."""
    known = [FORMATS[name].builder_factor for name in formats if name in FORMATS]
    factor = HEAD_FACTOR if segment == "head" else max(known, default=BUILDER_FACTOR)
    return BUILDER_BASE + round(weights * factor)


def check_memory_here(segment: str, need: int) -> None:
    """Raise CanvasError when a segment's builder would take more memory than is free."""
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


def check_disk(needed: Mapping[Path, int]) -> None:
    """Raise CanvasError when the disks of some folders have less free space than needed, in bytes."""
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
                "free space there, or name another disk with -o and CANVASRT_CACHE",
            )


def same_disk(one: Path, other: Path) -> bool:
    """Return whether two folders, which need not exist yet, are on one disk."""
    devices = [
        os.stat(next(path for path in (folder, *folder.parents) if path.exists())).st_dev
        for folder in (one.resolve(), other.resolve())
    ]
    return devices[0] == devices[1]


def _total(
    source: Source, precision: str, layers_per_segment: int, formats: Mapping[str, str] | None
) -> int:
    return sum(memory.segment_bytes(source.model, precision, layers_per_segment, formats).values())


def gigabytes(count: int) -> str:
    """Format a number of bytes for a message."""
    return f"{count / 1e9:.1f} GB"
