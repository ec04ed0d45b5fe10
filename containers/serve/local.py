"""Serves a checkpoint directly: chooses the best target for this machine, and builds the engines once, into the
cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from canvasrt import machine
from canvasrt.bundle import MANIFEST
from canvasrt.cache import cache_folder, key_of
from canvasrt.checkpoints.locate import BUNDLED, find_checkpoint, is_hub_name
from canvasrt.containers.serve.build_engines import EngineBuild, Wait, run_build
from canvasrt.containers.serve.prepare import build_once, versions_for
from canvasrt.machine import Gpu
from canvasrt.targets import TARGETS, Target, find_target

Say = Callable[[str], None]


@dataclass(frozen=True)
class Local:
    """A checkpoint's engines for this machine. `why` is the reason why no GPU's target was chosen."""

    checkpoint: Path
    target: Target
    engines: Path
    why: str = ""

    @property
    def is_built(self) -> bool:
        """Whether the engines are in the cache."""
        return (self.engines / MANIFEST).exists()


def is_checkpoint(path: Path) -> bool:
    """Return whether the argument is a checkpoint: a folder, the name of a bundled checkpoint, or a hub name."""
    if path.exists():
        return (path / "config.json").exists() and not (path / MANIFEST).exists()
    return str(path) in BUNDLED or is_hub_name(str(path))


def plan_local(name: Path, cache: Path | None = None) -> Local:
    """Return what `build_local` would build. A checkpoint from the hub is downloaded first."""
    checkpoint = find_checkpoint(name)
    target, why = best_target()
    folder = (cache or cache_folder()) / "served" / _key(checkpoint, target)
    return Local(checkpoint, target, folder, why)


def best_target(gpus: Sequence[Gpu] | None = None) -> tuple[Target, str]:
    """Return the target of the largest GPU that has a usable target, and an empty string. If no GPU has a usable
    target, return `cpu` and the reasons."""
    gpus = machine.gpus() if gpus is None else gpus
    reasons = [] if gpus else [machine.why_no_gpu()]
    for gpu in sorted(gpus, key=lambda each: -each.memory):
        # Skip targets with several capabilities: they are limited to the formats of their oldest GPU.
        alike = [each for each in TARGETS if each.capabilities == (gpu.capability,)]
        if not alike:
            reasons.append(f"there is no target for {gpu.name}")
            continue
        target = min(alike, key=lambda each: _distance(each, gpu))
        reason = machine.builds_here(target) or machine.runs_here(target)
        if not reason:
            return target, ""
        reasons.append(f"{target.name} {reason}")
    return find_target("cpu"), "; ".join(reasons)


def build_local(local: Local, say: Say) -> None:
    """Build the engines unless the cache has them.

    If the build fails, raises CanvasError with the build's message.
    """
    wait = Wait(notify=say)
    what = f"{local.checkpoint} for {local.target.name}"

    def build() -> None:
        say(f"building {what}; this happens once")
        job = EngineBuild(
            str(local.checkpoint),
            local.target.name,
            str(local.engines),
            memory=_memory_for(local.target),
        )
        run_build(job, what, local.engines.parents[1], wait)

    build_once(local.engines, wait, build)


def _memory_for(target: Target) -> int | None:
    """Return the memory that engines can use, in bytes: for the CPU target, the memory of this machine; for other
    targets, the memory of the largest GPU with the target's capability, or None if there is no such GPU."""
    if target.capability is None:
        return machine.memory_bytes()
    alike = [gpu.memory for gpu in machine.gpus() if gpu.capability in target.capabilities]
    return max(alike, default=None)


def _distance(target: Target, gpu: Gpu) -> tuple[bool, bool, int]:
    """Return a sort key: first the GPU's own target, then targets that fit in its memory, the closest in size first."""
    memory = target.memory or 0
    return target.gpu not in gpu.name, memory > 1.1 * gpu.memory, abs(memory - gpu.memory)


def _key(checkpoint: Path, target: Target) -> str:
    """Return a name that depends on the checkpoint's files, the target, and canvasrt's and the builder's versions."""
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(checkpoint.iterdir())
        if path.is_file()
    ]
    inputs = {
        "checkpoint": str(checkpoint),
        "files": files,
        "target": target.name,
        **versions_for(target),
    }
    return key_of(inputs)[:16]
