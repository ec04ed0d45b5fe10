"""What is installed, what works on this machine, and the command that mends each gap."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from canvasrt import __version__, extras, machine
from canvasrt.console import size
from canvasrt.errors import CanvasError

State = Literal["ok", "gap", "info"]

_GB = 10**9
_OLDEST_PYTHON = (3, 11)
_ENOUGH_DISK = 2 * _GB
_ENOUGH_SHARED = 64 * 2**20  # bytes of /dev/shm that Triton's Python backend asks for at start
# Extra → its distributions that are worth naming, and what it is for.
_EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "export": (
        ("torch", "onnx", "onnxscript", "onnx-ir", "safetensors"),
        "export a checkpoint",
    ),
    "rtx": (("tensorrt-rtx",), "build engines for RTX GPUs"),
    "tensorrt": (("tensorrt",), "build engines for data-centre GPUs"),
    "serve": (("nvidia-pytriton", "tritonclient"), "serve through Triton"),
}
# Extras that every machine can use; a machine without them has a gap.
_WANTED = ("export", "rtx", "serve")


@dataclass(frozen=True)
class Check:
    """One line of the report. `fix` is the command that mends a gap."""

    name: str
    state: State
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object with a key a field."""
        return asdict(self)


def examine() -> list[Check]:
    """Every check, in the order in which they are shown."""
    checks = [_python(), _onnxruntime()]
    checks += [_extra(name) for name in _EXTRAS]
    checks += [*_gpus(), _triton(), _containers(), _memory(), _disk(), _shared_memory()]
    return checks


def report() -> dict[str, Any]:
    """The whole examination as data."""
    checks = examine()
    return {
        "canvasrt": __version__,
        "machine": machine.description(),
        "checks": [check.to_json() for check in checks],
        "gaps": sum(check.state == "gap" for check in checks),
    }


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < _OLDEST_PYTHON:
        return Check("Python", "gap", found, "apt install python3.11 python3.11-venv")
    return Check("Python", "ok", found)


def _onnxruntime() -> Check:
    name = "ONNX Runtime"
    both = extras.version("onnxruntime"), extras.version("onnxruntime-gpu")
    if all(both):
        return Check(
            name,
            "gap",
            "onnxruntime and onnxruntime-gpu overwrite each other's files",
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'canvasrt[gpu]'",
        )
    if not any(both):
        return Check(name, "gap", "not installed", "pip install 'canvasrt[cpu]'")
    try:
        runtime = extras.require("onnxruntime", "cpu")
    except CanvasError as error:
        return Check(name, "gap", error.message, error.hint)
    providers = [
        each.removesuffix("ExecutionProvider") for each in runtime.get_available_providers()
    ]
    found = f"{both[0] or both[1]}, providers: {', '.join(providers)}"
    if machine.gpus() and "CUDA" not in providers:
        fix = "pip uninstall -y onnxruntime && pip install 'canvasrt[gpu]'"
        return Check(name, "info", f"{found}; it does not use the GPU", fix)
    return Check(name, "ok", found)


def _extra(extra: str) -> Check:
    distributions, purpose = _EXTRAS[extra]
    versions = {name: extras.version(name) for name in distributions}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if version is None]
    name = f"To {purpose}"
    if not missing:
        return Check(name, "ok", found)
    state: State = "gap" if extra in _WANTED or found else "info"
    text = f"{found}; not installed: {', '.join(missing)}".removeprefix("; ")
    return Check(name, state, text, f"pip install 'canvasrt[{extra}]'")


def _gpus() -> list[Check]:
    found = machine.gpus()
    if not found:
        return [Check("GPU", "info", "none that nvidia-smi knows: the CPU runs everything")]
    return [
        Check(
            f"GPU {number}",
            "ok",
            f"{gpu.name}, {size(gpu.memory)}, capability {'.'.join(map(str, gpu.capability))},"
            f" driver {gpu.driver}",
        )
        for number, gpu in enumerate(found)
    ]


def _triton() -> Check:
    from canvasrt.containers.serve.installation import find_installation

    name = "Triton Inference Server"
    try:
        binary = find_installation().binary
    except CanvasError as error:
        return Check(name, "gap", error.message, error.hint)
    try:
        answer = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=60)
        said = answer.stdout + answer.stderr
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    if "Usage: tritonserver" not in said:
        fix = "use a system with glibc 2.35 or later (Debian 12, Ubuntu 22.04)"
        return Check(name, "gap", f"{binary} does not start: {said.strip()[-200:]}", fix)
    return Check(name, "ok", str(binary))


def _containers() -> Check:
    found = [tool for tool in ("docker", "podman", "buildah", "skopeo") if shutil.which(tool)]
    if found:
        return Check("Containers", "ok", ", ".join(found))
    return Check("Containers", "info", "no docker or podman", "apt install podman")


def _memory() -> Check:
    return Check("Memory", "ok", size(machine.memory_bytes()))


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{size(free)} free in {Path.cwd()}"
    if free < _ENOUGH_DISK:
        return Check("Disk", "gap", found, "free some space, or work in a folder on another disk")
    return Check("Disk", "ok", found)


def _shared_memory() -> Check:
    name = "Shared memory"
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check(name, "gap", "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    if free < _ENOUGH_SHARED:
        fix = "mount -o remount,size=1g /dev/shm (in a container: --shm-size 1g)"
        return Check(name, "gap", f"{size(free)} free in /dev/shm; Triton wants more", fix)
    return Check(name, "ok", f"{size(free)} free in /dev/shm")
