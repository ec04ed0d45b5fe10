"""Queries this machine's GPUs, processors, memory and disk. Imports no GPU library."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from canvasrt import extras
from canvasrt.targets import Target

_QUERY = ("name", "memory.total", "compute_cap", "driver_version", "uuid")
# CUDA's variable for the GPUs that a process may use.
VISIBLE = "CUDA_VISIBLE_DEVICES"
# The oldest driver for CUDA 13. NVIDIA's images have an entry point that supports older drivers on data-centre GPUs;
# this project's images do not use it.
OLDEST_DRIVER = 580
_MIB = 1 << 20
# Builder → its module, and the extra that installs it.
BUILDER_MODULES = {
    "onnxruntime": ("onnxruntime", "cpu"),
    "tensorrt-rtx": ("tensorrt_rtx", "rtx"),
    "tensorrt": ("tensorrt", "tensorrt"),
}


@dataclass(frozen=True)
class Gpu:
    """One GPU, as described by nvidia-smi; memory in bytes."""

    name: str
    memory: int
    capability: tuple[int, int]
    driver: str
    uuid: str = ""

    @property
    def driver_number(self) -> int:
        """The driver's release, for example 580; if its form is unknown, a large number."""
        number = self.driver.partition(".")[0]
        return int(number) if number.isdecimal() else 10**6

    @property
    def capability_text(self) -> str:
        """The compute capability, for example 8.9."""
        return ".".join(map(str, self.capability))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with one key per field."""
        return {**asdict(self), "capability": self.capability_text}


def gpus() -> tuple[Gpu, ...]:
    """Return this machine's NVIDIA GPUs. If CUDA_VISIBLE_DEVICES is set, return only the GPUs that it names."""
    names = os.environ.get(VISIBLE)
    if names is None:
        return _listed()
    # nvidia-smi's table has no MIG instances, so names of MIG instances cannot be looked up in it.
    return _listed() if "MIG-" in names else tuple(named_gpus(names, _listed()))


def named_gpus(names: str, listed: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that `names` lists, each by nvidia-smi's number, its UUID or a prefix of its UUID."""
    found = []
    for name in filter(None, map(str.strip, names.split(","))):
        of_uuid = [gpu for gpu in listed if gpu.uuid and gpu.uuid.startswith(name)]
        of_number = listed[int(name) : int(name) + 1] if name.isdecimal() else ()
        # As in CUDA, a prefix of several UUIDs names no GPU.
        found += of_uuid if len(of_uuid) == 1 else list(of_number)
    return found


def why_no_gpu() -> str:
    """Return why `gpus` is empty."""
    if _listed():
        return f"{VISIBLE} is {os.environ.get(VISIBLE)!r}, which names no GPU here"
    return f"nvidia-smi failed: {_asked()[1]}" if _asked()[1] else "nvidia-smi reports no GPU"


def has_nvidia_device() -> bool:
    """Return whether a device of NVIDIA is on the PCI bus, even if its driver does not work."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(each.read_text().strip() == "0x10de" for each in vendors)


def _listed() -> tuple[Gpu, ...]:
    """Return nvidia-smi's list of GPUs; empty if nvidia-smi is missing or does not answer."""
    return tuple(gpu for line in _asked()[0].splitlines() if (gpu := parse_gpu(line)))


@cache
def _asked() -> tuple[str, str]:
    """Return nvidia-smi's table, and its error message if it failed, for example after a driver update."""
    if shutil.which("nvidia-smi") is None:
        return "", ""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        # Without persistence mode, the driver has to initialize each GPU, which can take seconds.
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if answer.returncode == 0:
        return answer.stdout, ""
    said = (answer.stdout + answer.stderr).strip().splitlines()
    return answer.stdout, "; ".join(said[:2]) or f"exit code {answer.returncode}"


def building_gpu(target: Target) -> Gpu | None:
    """Return the GPU on which TensorRT builds and times a target's engines; None if they need no GPU, or if this
    machine has no such GPU. CUDA's first GPU may have another capability."""
    fitting = () if target.builds_anywhere else gpus()
    alike = [each for each in fitting if each.capability in target.capabilities]
    return min(alike, key=lambda each: target.gpu not in each.name, default=None)


def parse_gpu(line: str) -> Gpu | None:
    """Parse one line of nvidia-smi's table; None if the line describes no GPU. If nvidia-smi shows [N/A] as the memory,
    the GPU shares the host's memory. Then use all of the host's memory, because a container's limit does not apply to
    what the driver allocates."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_QUERY):
        return None
    name, memory, capability, driver, uuid = cells
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return None
    found = int(memory) * _MIB if memory.isdigit() else _host_bytes()
    return Gpu(name, found, (int(major), int(minor)), driver, uuid)


def memory_bytes() -> int:
    """Return this machine's memory, or the container's limit if that is lower."""
    total = _host_bytes()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the free memory, or what is left of the container's limit if that is less."""
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
        # The page cache counts as used, but is freed when memory is needed.
        return min(free, limit - used + int(stat[stat.index("inactive_file") + 1]))
    except (OSError, ValueError):
        return free


def return_freed_memory() -> None:
    """Give this process's freed memory back to the system. Otherwise glibc's allocator keeps over a GB after weights
    were quantized."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # other C libraries lack it
        trim(0)


def builds_here(target: Target) -> str:
    """Return why engines for a target cannot be built on this machine; empty if they can."""
    module, extra = BUILDER_MODULES[target.builder]
    if not target.builds_anywhere and not has_gpu(target):
        return f"needs its GPU ({target.gpu})"
    if not extras.is_installed(module):
        return f"needs canvasrt[{extra}]"
    return ""


def runs_here(target: Target) -> str:
    """Return why a target's engines cannot run on this machine; empty if they can."""
    if target.capability is not None and not has_gpu(target):
        return f"needs its GPU ({target.gpu})"
    if old := old_driver([gpu for gpu in gpus() if gpu.capability in target.capabilities]):
        return old
    module, extra = BUILDER_MODULES[target.builder]
    return "" if extras.is_installed(module) else f"needs canvasrt[{extra}]"


def old_driver(found: Sequence[Gpu]) -> str:
    """Return a warning that these GPUs' driver is too old; empty if it is new enough."""
    if not found or any(gpu.driver_number >= OLDEST_DRIVER for gpu in found):
        return ""
    return f"needs a driver of {OLDEST_DRIVER} or newer; this machine has {found[0].driver}"


def has_gpu(target: Target) -> bool:
    """Return whether this machine has a GPU that the target's engines run on."""
    return any(gpu.capability in target.capabilities for gpu in gpus())


def description() -> dict[str, Any]:
    """Return this machine's system, architecture, processors, memory, free disk space and GPUs."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "memory": memory_bytes(),
        "disk_free": shutil.disk_usage(Path.cwd()).free,
        "gpus": [gpu.to_json() for gpu in gpus()],
    }
