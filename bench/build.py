"""Measures the seconds, peak memory and output bytes of each stage and segment of a build.

It writes a random checkpoint, exports it and builds its engines, as `canvasrt` does, with nothing cached. Memory is
sampled as the sum over all processes of a stage. Mapped files count while they are resident.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench import results
from canvasrt.build.options import BuildOptions
from canvasrt.bundle import load_bundle
from canvasrt.defaults import LAYERS_PER_SEGMENT, SLOTTED, SORTED
from canvasrt.pipeline import build_all, plan_all
from canvasrt.progress import listening
from canvasrt.targets import find_target
from canvasrt.types import Json

Experts = Literal[SLOTTED, SORTED]  # type: ignore[valid-type]
EVERY = 0.05  # seconds between samples
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GRAPH = re.compile(r'"graph": "[^"]*/(\w+)\.onnx"')


@dataclass
class Peak:
    """The peak memory seen, in bytes: all resident memory, and the part that is not file-backed."""

    resident: int = 0
    own: int = 0

    def see(self, resident: int, own: int) -> None:
        self.resident, self.own = max(self.resident, resident), max(self.own, own)


class Sampler:
    """Inside the `with` block, samples a folder's size on disk and the memory of this process's descendants: in total,
    and per segment being built."""

    def __init__(self, folder: Path | None = None) -> None:
        self.whole = Peak()
        self.disk = 0
        self._folder = folder
        self.segments: dict[str, Peak] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            sizes = {pid: memory_of(pid) for pid in _descendants(os.getpid())}
            self.whole.see(sum(r for r, _ in sizes.values()), sum(o for _, o in sizes.values()))
            if self._folder is not None:
                self.disk = max(self.disk, _disk(self._folder))
            for pid, size in sizes.items():
                if segment := _segment(pid):
                    self.segments.setdefault(segment, Peak()).see(*size)


def _descendants(root: int) -> list[int]:
    """Return `root` and its descendants. A build in this process starts its builders as children."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # the process has ended in the meantime
                continue
    return found


def memory_of(pid: int) -> tuple[int, int]:
    """Return a process's resident bytes, and how many of them are not file-backed."""
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except (OSError, ValueError):
        return 0, 0
    return int(resident) * _PAGE, (int(resident) - int(shared)) * _PAGE


def _segment(pid: int) -> str | None:
    """Return the segment that a builder process builds; None for other processes."""
    try:
        found = _GRAPH.search(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _row(name: str, seconds: float, peak: Peak, written: int) -> Json:
    return {
        "stage": name,
        "seconds": round(seconds, 2),
        "peak bytes": peak.resident,
        "not file-backed": peak.own,
        "bytes written": written,
    }


def _disk(folder: Path) -> int:
    """Return the total size on disk of a folder's files, in bytes. A file with several hard links counts once."""
    found = {}
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # the file has been removed
            stat = file.lstat()
            found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run(command: Sequence[str], name: str, out: Path) -> Json:
    """Run one stage in a separate process; return its row."""
    start = time.monotonic()
    with Sampler() as sampler:
        program = [sys.executable, "-m", *command]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    return _row(name, time.monotonic() - start, sampler.whole, _size(out))


def run_build(
    graphs: Path, target: str, out: Path, wanted: BuildOptions
) -> tuple[list[Json], Json]:
    """Build engines from graphs.

    Return a row for the stage and one per segment. Also return bytes of device memory: the plan's estimate, and the
    largest activation memory that the builder reports for an engine.
    """
    begun: dict[str, float] = {}
    took: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        if found := re.match(r"building (\w+) for", what):
            if done:
                took[found[1]] = time.monotonic() - begun[found[1]]
            else:
                begun[found[1]] = time.monotonic()

    (planned,) = plan_all(graphs, [find_target(target)], out, wanted)
    start = time.monotonic()
    with Sampler() as sampler, listening(progress):
        ((_, bundle),) = build_all([planned])
    rows = [_row(f"build for {target}", time.monotonic() - start, sampler.whole, _size(out))]
    for entry in bundle.manifest.segments:
        if (name := entry["name"]) in took:  # for a CPU, segments are not built one by one
            peak = sampler.segments.get(name, Peak())
            written = bundle.manifest.files[entry["file"]]["bytes"]
            rows.append(_row(f"{name} for {target}", took[name], peak, written))
    activations = [entry.get("activation_bytes") or 0 for entry in bundle.manifest.segments]
    memory = {**planned.memory.to_json(), "largest_activations": max(activations)}
    return rows, {"target": target} | memory


def measure(
    shape: str = "released",
    layers: Annotated[int | None, typer.Option(help="Default: the shape's own number.")] = None,
    format: Literal["nvfp4", "int4", "bf16"] = "nvfp4",
    target: Annotated[str, typer.Option(help="Targets, separated by commas.")] = "rtx-5090",
    layers_per_segment: int = LAYERS_PER_SEGMENT,
    max_context: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of a request; engines take one request at a time."),
    ] = None,
    experts: Experts = SLOTTED,
    keep: Annotated[
        Path | None, typer.Option(help="An empty folder that keeps graphs and engines.")
    ] = None,
    out: results.Out = None,
) -> None:
    """Create a checkpoint, export it and build it for each target in turn. All 30 layers take 55 GB of disk."""
    work = keep or Path(tempfile.mkdtemp(prefix="canvasrt-build-"))
    before, os.environ["CANVASRT_CACHE"] = os.environ.get("CANVASRT_CACHE"), str(work / "cache")
    sizes: Any = {} if max_context is None else {"max_context": max_context, "max_batch": 1}
    wanted = replace(BuildOptions(experts=experts), **sizes)
    checkpoint, graphs = work / "checkpoint", work / "graphs"
    shortened = ["--layers", str(layers)] if layers else []
    plain = ["--precision", "bf16"] if format == "bf16" else []
    cut = ["--layers-per-segment", str(layers_per_segment)]
    try:
        command = ["bench", "checkpoint", "--shape", shape, "--format", format, *shortened]
        rows = [run([*command, "-o", str(checkpoint)], "checkpoint", checkpoint)]
        command = ["canvasrt", "export", str(checkpoint), *plain, *cut, "-o", str(graphs)]
        exported = run(command, "export", graphs)
        rows.append(exported)
        count = len(load_bundle(graphs, check=False).manifest.model.layers)
        memory, builds = [], []
        shutil.rmtree(checkpoint)  # the graphs contain its weights; the engines need the space
        for name in target.split(","):
            engines = work / f"engines-{name}"
            built, needed = run_build(graphs, name, engines, wanted)
            rows += built
            memory.append(needed)
            builds.append(
                {
                    "weights": format,
                    "layers": count,
                    "target": name,
                    "export and build, s": exported["seconds"] + built[0]["seconds"],
                    "peak memory, GB": max(exported["peak bytes"], built[0]["peak bytes"]) / 1e9,
                    "engines, GB": built[0]["bytes written"] / 1e9,
                }
            )
            if keep is None:
                shutil.rmtree(engines)
                shutil.rmtree(work / "cache", ignore_errors=True)
    finally:
        if keep is None:
            shutil.rmtree(work)
        del os.environ["CANVASRT_CACHE"]
        if before is not None:
            os.environ["CANVASRT_CACHE"] = before
    figures = {"shape": shape, "builds": builds, "stages": rows, "device memory": memory}
    results.report(figures, out)
