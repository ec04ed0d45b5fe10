"""What this machine has: GPUs, processors, memory, disk. Nothing here imports a GPU library."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from canvasrt import extras
from canvasrt.targets import Target

_QUERY = ("name", "memory.total", "compute_cap", "driver_version")
_MIB = 1 << 20
# Builder → the module that must be there, and the extra that brings it.
BUILDER_MODULES = {
    "onnxruntime": ("onnxruntime", "cpu"),
    "tensorrt-rtx": ("tensorrt_rtx", "rtx"),
    "tensorrt": ("tensorrt", "tensorrt"),
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi describes it; memory in bytes."""

    name: str
    memory: int
    capability: tuple[int, int]
    driver: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object with a key a field."""
        return {**asdict(self), "capability": ".".join(map(str, self.capability))}


@cache
def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs here; none when nvidia-smi is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(gpu for line in answer.stdout.splitlines() if (gpu := parse_gpu(line)))


def parse_gpu(line: str) -> Gpu | None:
    """One line of nvidia-smi's table. Unified memory is reported as [N/A]: the host's counts then."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_QUERY):
        return None
    name, memory, capability, driver = cells
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return None
    found = int(memory) * _MIB if memory.isdigit() else memory_bytes()
    return Gpu(name, found, (int(major), int(minor)), driver)


def memory_bytes() -> int:
    """The memory of this machine, or of the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def available_bytes() -> int:
    """The memory that is free, or that a container's limit leaves where that is less."""
    free = memory_bytes()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        stat = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        # Files in memory count as used and are given back when something needs the room.
        return min(free, limit - used + int(stat[stat.index("inactive_file") + 1]))
    except (OSError, ValueError):
        return free


def builds_here(target: Target) -> str:
    """Why engines for a target cannot be built on this machine; empty when they can."""
    module, extra = BUILDER_MODULES[target.builder]
    if not target.builds_anywhere and not has_gpu(target):
        return f"needs its GPU ({target.gpu})"
    if not extras.is_installed(module):
        return f"needs canvasrt[{extra}]"
    return ""


def runs_here(target: Target) -> str:
    """Why engines of a target cannot run on this machine; empty when they can."""
    if target.capability is not None and not has_gpu(target):
        return f"needs its GPU ({target.gpu})"
    module, extra = BUILDER_MODULES[target.builder]
    return "" if extras.is_installed(module) else f"needs canvasrt[{extra}]"


def has_gpu(target: Target) -> bool:
    """Whether a GPU of the target's capability is in this machine."""
    return any(gpu.capability == target.capability for gpu in gpus())


def description() -> dict[str, Any]:
    """Architecture, processors, memory and free disk space of this machine."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "memory": memory_bytes(),
        "disk_free": shutil.disk_usage(Path.cwd()).free,
        "gpus": [gpu.to_json() for gpu in gpus()],
    }
