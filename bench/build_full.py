"""Measures what building a model takes: seconds, peak memory and bytes of each stage and segment.

    python -m bench.build_full --layers 30 -o DIR     # the released shape, in NVFP4, for rtx-5090
    python -m bench.build_full --shape narrow -o DIR  # the same in a minute
    python -m bench.build_full --format int4 --target rtx-4090,cpu --layers-per-segment 3 -o DIR
    python -m bench.build_full --format int4 --target cpu --verify -o DIR
    python -m bench.build_full --experts sorted -o DIR

It writes a random checkpoint, exports it and builds its engines, each as `canvasrt` does, with
nothing cached. With `--verify`, bundles that run on this machine are compared with the checkpoint
as `canvasrt verify --reference` does. Results go to `DIR/build.json` and `DIR/build.md`. Memory is sampled over all
processes of a stage together; mapped files count while they are in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from canvasrt import extras
from canvasrt.build.plan import BuildOptions
from canvasrt.bundle import load_bundle
from canvasrt.defaults import LAYERS_PER_SEGMENT, SLOTTED, SORTED
from canvasrt.machine import memory_bytes
from canvasrt.pipeline import build_all, plan_all
from canvasrt.targets import find_target

EVERY = 0.05  # seconds between samples
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GRAPH = re.compile(r'"graph": "[^"]*/(\w+)\.onnx"')


@dataclass
class Peak:
    """The peak memory seen, in bytes: resident, and the part that is not file-backed."""

    resident: int = 0
    own: int = 0

    def see(self, resident: int, own: int) -> None:
        self.resident, self.own = max(self.resident, resident), max(self.own, own)


class Sampler:
    """Watches this process's descendants inside the block: all together, and each builder by its segment."""

    def __init__(self) -> None:
        self.whole = Peak()
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
            for pid, size in sizes.items():
                if segment := _segment(pid):
                    self.segments.setdefault(segment, Peak()).see(*size)


def _descendants(root: int) -> list[int]:
    """Return `root` and its descendants, which include the builders of a build in this process."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # it has ended in the meantime
                continue
    return found


def memory_of(pid: int) -> tuple[int, int]:
    """Return a process's resident bytes, and those that are not file-backed."""
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


@dataclass
class StageUse:
    """One line of the table. `bytes` is how much it wrote."""

    name: str
    seconds: float
    peak: Peak
    bytes: int


@dataclass
class BuildReport:
    """Everything that was measured."""

    options: dict[str, Any]
    machine: dict[str, Any]
    stages: list[StageUse] = field(default_factory=list)
    segments: list[StageUse] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)  # device bytes by target

    @property
    def seconds(self) -> float:
        """Export and build: the time that a user waits."""
        return sum(row.seconds for row in self._waited)

    @property
    def peak(self) -> int:
        return max(row.peak.resident for row in self._waited)

    @property
    def _waited(self) -> list[StageUse]:
        return [row for row in self.stages if row.name == "export" or row.name.startswith("build")]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "peak": self.peak}

    def to_markdown(self) -> str:
        title = ", ".join(f"{name} {value}" for name, value in self.options.items())
        lines = [
            f"{title}; {', '.join(f'{name} {value}' for name, value in self.machine.items())}",
            "",
            "| stage or segment | seconds | peak memory | not file-backed | bytes written |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for row in (*self.stages, *self.segments):
            sizes = (row.peak.resident, row.peak.own, row.bytes)
            cells = (row.name, f"{row.seconds:.1f}", *(f"{size / 1e9:.2f} GB" for size in sizes))
            lines.append(f"| {' | '.join(cells)} |")
        for target, sizes in self.memory.items():
            parts = (
                f"{name.replace('_', ' ')} {size / 1e9:.2f} GB" for name, size in sizes.items()
            )
            lines += ["", f"on {target}: {', '.join(parts)}"]
        lines += ["", f"export and build: {self.seconds:.0f} s, at most {self.peak / 1e9:.2f} GB"]
        return "\n".join(lines) + "\n"


def run(command: Sequence[str], name: str, out: Path, check: bool = True) -> StageUse:
    """Run one stage in a process of its own. Without `check`, a failure only shows in its name."""
    start = time.monotonic()
    with Sampler() as sampler:
        program = [sys.executable, "-m", *command]
        done = subprocess.run(program, check=check, stdout=subprocess.DEVNULL)
    name += f" (exit code {done.returncode})" if done.returncode else ""
    return StageUse(name, time.monotonic() - start, sampler.whole, _size(out))


def run_build(
    graphs: Path, target: str, out: Path, wanted: BuildOptions
) -> tuple[StageUse, list[StageUse], dict[str, int]]:
    """Build engines from graphs.

    Return the stage's row, one per segment, and bytes of device memory: the plan's estimate, and the most that the
    builder says an engine needs for activations.
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
    with Sampler() as sampler:
        ((_, bundle),) = build_all([planned], progress)
    whole = StageUse(f"build for {target}", time.monotonic() - start, sampler.whole, _size(out))
    activations = [entry.get("activation_bytes") or 0 for entry in bundle.manifest.segments]
    memory = {**planned.memory.to_json(), "largest_activations": max(activations)}
    rows = [
        StageUse(
            f"{entry['name']} for {target}",
            took[entry["name"]],
            sampler.segments.get(entry["name"], Peak()),
            bundle.manifest.files[entry["file"]]["bytes"],
        )
        for entry in bundle.manifest.segments
        if entry["name"] in took  # a CPU's are not built one by one
    ]
    return whole, rows, memory


def measure(
    shape: str,
    layers: int | None,
    format: str,
    targets: str,
    layers_per_segment: int,
    work: Path,
    keep: bool,
    max_context: int | None = None,
    verify: bool = False,
    experts: str = SLOTTED,
) -> BuildReport:
    """Create the checkpoint in `work`, export it and build it there for one target after the other.

    With `max_context`, engines take one request of so many tokens.
    """
    os.environ["CANVASRT_CACHE"] = str(work / "cache")
    checkpoint, graphs = work / "checkpoint", work / "graphs"
    shortened = ["--layers", str(layers)] if layers else []
    options: dict[str, Any] = {"shape": shape, "format": format, "target": targets}
    wanted = BuildOptions(experts=experts)
    if max_context is not None:
        options["max_context"] = max_context
        wanted = replace(wanted, max_context=max_context, max_batch=1)
    if experts != SLOTTED:
        options["experts"] = experts
    machine = {
        "processors": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "tensorrt-rtx": extras.version("tensorrt-rtx"),
    }
    report = BuildReport(options, machine)
    command = ["bench.synthetic", "--shape", shape, "--format", format, *shortened]
    report.stages.append(run([*command, "-o", str(checkpoint)], "checkpoint", checkpoint))
    plain = ["--precision", "bf16"] if format == "bf16" else []
    cut = ["--layers-per-segment", str(layers_per_segment)]
    command = ["canvasrt", "export", str(checkpoint), *plain, *cut, "-o", str(graphs)]
    report.stages.append(run(command, "export", graphs))
    options["layers"] = len(load_bundle(graphs, check=False).manifest.model.layers)
    if not verify:
        # The graphs contain everything in the checkpoint; free the disk for engines.
        shutil.rmtree(checkpoint)
    for target in targets.split(","):
        engines = work / f"engines-{target}"
        built, segments, memory = run_build(graphs, target, engines, wanted)
        report.memory[target] = memory
        report.stages.append(built)
        report.segments += segments
        if verify and find_target(target).builder == "onnxruntime":
            reports = work / f"report-{target}"
            against = ["--reference", str(checkpoint), "--report", str(reports)]
            command = ["canvasrt", "verify", str(engines), *against]
            report.stages.append(run(command, f"verify {target}", reports, check=False))
        if not keep:
            shutil.rmtree(engines)
            shutil.rmtree(work / "cache")
    machine["largest_child_gb"] = round(
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 2
    )
    return report


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, required=True, help="an empty folder")
    parser.add_argument("--shape", default="released", help="default: released")
    parser.add_argument("--layers", type=int, help="default: the shape's own number")
    parser.add_argument("--format", default="nvfp4", choices=("nvfp4", "int4", "bf16"))
    parser.add_argument("--target", default="rtx-5090", help="one, or several with commas")
    parser.add_argument("--layers-per-segment", type=int, default=LAYERS_PER_SEGMENT)
    parser.add_argument("--max-context", type=int, help="tokens, for a batch of one")
    parser.add_argument("--experts", default=SLOTTED, choices=(SLOTTED, SORTED))
    parser.add_argument("--verify", action="store_true", help="compare with the checkpoint")
    parser.add_argument("--keep", action="store_true", help="keep graphs and engines")
    args = parser.parse_args()
    work = args.output / "work"
    work.mkdir(parents=True)
    try:
        report = measure(
            args.shape,
            args.layers,
            args.format,
            args.target,
            args.layers_per_segment,
            work,
            args.keep,
            args.max_context,
            args.verify,
            args.experts,
        )
    finally:
        if not args.keep:
            shutil.rmtree(work)
    (args.output / "build.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    (args.output / "build.md").write_text(report.to_markdown())
    print(report.to_markdown(), end="")


if __name__ == "__main__":
    main()
