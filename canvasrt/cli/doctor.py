"""`canvasrt doctor`: shows what is installed and works on this machine, and which commands fix problems."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from canvasrt import __version__, extras
from canvasrt.cli.options import AsJson, option
from canvasrt.console import emit, size
from canvasrt.errors import CanvasError

Status = Literal["ok", "gap", "info"]

_GB = 10**9
_ENOUGH_DISK = 2 * _GB
_ENOUGH_SHARED = 64 * 2**20  # bytes of /dev/shm that Triton's Python backend needs to start
# Extra → its main distributions, and what they are for.
_EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "export": (
        ("torch", "onnx", "onnxscript", "onnx-ir", "safetensors"),
        "export a checkpoint",
    ),
    "rtx": (("tensorrt-rtx",), "build engines for RTX GPUs"),
    "tensorrt": (("tensorrt",), "build engines for data-centre GPUs"),
    "sorted": (("triton",), "build engines with --experts sorted"),
    "serve": (("nvidia-pytriton", "tritonclient"), "serve through Triton"),
}
# Every machine can use these extras, so a missing one is a gap.
_WANTED = ("export", "rtx", "serve")

_WSL_FIX = "see docs/hardware.md, section Windows: the driver is installed in Windows, not in WSL"
_STYLES = {
    "ok": "green",
    "gap": "bold red",
    "info": "dim",
}


@dataclass(frozen=True)
class MachineCheck:
    """One line of the report. `fix` is the command that closes a gap."""

    name: str
    state: Status
    found: str
    fix: str = ""


Report = Annotated[
    Path | None,
    option(
        "--report",
        "FILE",
        "Also write a file to attach to a question: versions, GPUs, plans and the last logs, without secrets.",
    ),
]


def doctor(report: Report = None, as_json: AsJson = False) -> None:
    """Show what is installed and works on this machine, and how to fix what does not."""
    from rich.text import Text

    from canvasrt import machine, nvml

    checks = examine()
    data = {
        "canvasrt": __version__,
        "machine": machine.description(),
        "gpus_now": nvml.readings(),
        "checks": [asdict(check) for check in checks],
        "gaps": sum(check.state == "gap" for check in checks),
    }

    if report is not None:
        _write(report, data)

    def render(console: Any) -> None:
        for check in checks:
            mark = (f"{check.state:<4}", _STYLES[check.state])
            console.print(Text.assemble(mark, f" {check.name}: {check.found}"))
            if check.fix:
                console.print(f"     → {check.fix}")
        gaps = data["gaps"]
        console.print(
            "\nnothing is missing"
            if not gaps
            else f"\n{gaps} missing or broken: see the lines with → above"
        )

    emit(data, render)


def _write(file: Path, data: dict[str, Any]) -> None:
    from canvasrt.cli import doctor_report

    secrets = doctor_report.secrets_of(os.environ)
    found = doctor_report.without_secrets({**data, **doctor_report.report()}, secrets)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    try:
        # Environment variables are not always valid UTF-8.
        with file.open("x", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text + "\n")
    except OSError as error:
        raise CanvasError(
            f"cannot write {file}: {error.strerror}", "give another --report"
        ) from error


def examine() -> list[MachineCheck]:
    """Return all checks in display order."""
    python = f"{platform.python_version()} at {sys.executable}"
    checks = [MachineCheck("Python", "ok", python), _onnxruntime()]
    checks += [_extra(name) for name in _EXTRAS]
    checks += [*_gpus(), _triton(), _containers(), _memory(), _disk(), _shared_memory()]
    return checks


def _onnxruntime() -> MachineCheck:
    from canvasrt import machine

    name = "ONNX Runtime"
    both = extras.version("onnxruntime"), extras.version("onnxruntime-gpu")
    if all(both):
        return MachineCheck(
            name,
            "gap",
            "onnxruntime and onnxruntime-gpu overwrite each other's files",
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'canvasrt[gpu]'",
        )
    if not any(both):
        return MachineCheck(name, "gap", "not installed", "pip install 'canvasrt[cpu]'")
    try:
        runtime = extras.require("onnxruntime", "cpu")
    except CanvasError as error:
        return MachineCheck(name, "gap", error.message, error.hint)
    providers = [
        each.removesuffix("ExecutionProvider") for each in runtime.get_available_providers()
    ]
    found = f"{both[0] or both[1]}, providers: {', '.join(providers)}"
    if machine.gpus() and "CUDA" not in providers:
        fix = "pip uninstall -y onnxruntime && pip install 'canvasrt[gpu]'"
        return MachineCheck(name, "info", f"{found}; does not use the GPU", fix)
    return MachineCheck(name, "ok", found)


def _extra(extra: str) -> MachineCheck:
    distributions, purpose = _EXTRAS[extra]
    versions = {name: extras.version(name) for name in distributions}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if version is None]
    name = f"To {purpose}"
    if not missing:
        return MachineCheck(name, "ok", found)
    state: Status = "gap" if extra in _WANTED or found else "info"
    text = f"{found}; not installed: {', '.join(missing)}".removeprefix("; ")
    return MachineCheck(name, state, text, f"pip install 'canvasrt[{extra}]'")


def _gpus() -> list[MachineCheck]:
    from canvasrt import machine, nvml

    found = machine.gpus()
    if not found and (lacks := wsl_lacks(platform.release())):
        return [MachineCheck("GPU", "gap", f"WSL has no {lacks}", _WSL_FIX)]
    if not found:
        why = machine.why_no_gpu()
        if "failed" in why and machine.has_nvidia_device():
            fix = "restart the machine, or install NVIDIA's driver again, until nvidia-smi answers"
            return [MachineCheck("GPU", "gap", why, fix)]
        return [MachineCheck("GPU", "info", f"{why}; everything runs on the CPU")]
    now, checks = nvml.readings(), []
    for number, gpu in enumerate(found):
        text = (
            f"{gpu.name}, {size(gpu.memory)}, capability {gpu.capability_text},"
            f" driver {gpu.driver}{_now(now.get(gpu.uuid, {}))}"
        )
        old = gpu.driver_number < machine.OLDEST_DRIVER
        fix = f"install NVIDIA's driver {machine.OLDEST_DRIVER} or newer" if old else ""
        checks.append(MachineCheck(f"GPU {number}", "gap" if old else "ok", text, fix))
    return checks


def wsl_lacks(release: str, root: Path = Path("/")) -> str:
    """Return what WSL needs for a GPU but lacks; empty if nothing is missing. `release` is the kernel's version."""
    if "microsoft" not in release.lower():
        return ""
    if not (root / "dev/dxg").exists():
        return "GPU: /dev/dxg is missing (WSL 1, or no driver in Windows)"
    if not (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        return "driver: /usr/lib/wsl/lib/libcuda.so.1 is missing"
    return "" if shutil.which("nvidia-smi") else "nvidia-smi in PATH: add /usr/lib/wsl/lib"


def _now(values: dict[str, float]) -> str:
    """Return a GPU's current state as text; empty if the state is unknown."""
    shown = {
        "utilization_ratio": lambda ratio: f"{ratio:.0%} busy",
        "memory_used_bytes": lambda count: f"{size(count)} in use",
        "power_watts": lambda watts: f"{watts:.0f} W",
        "sm_clock_hertz": lambda hertz: f"{hertz / 1e6:.0f} MHz",
    }
    parts = [say(values[name]) for name, say in shown.items() if name in values]
    return f"; now {', '.join(parts)}" if parts else ""


def _triton() -> MachineCheck:
    from canvasrt.containers.serve.installation import find_installation

    name = "Triton Inference Server"
    try:
        installation = find_installation()
        binary = installation.binary
    except CanvasError as error:
        return MachineCheck(name, "gap", error.message, error.hint)
    try:
        answer = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=60)
        output = answer.stdout + answer.stderr
    except (OSError, subprocess.SubprocessError) as error:
        output = str(error)
    if "Usage: tritonserver" not in output:
        fix = "use a system with glibc 2.35 or later (Debian 12, Ubuntu 22.04)"
        return MachineCheck(name, "gap", f"{binary} does not start: {output.strip()[-200:]}", fix)
    found = f"{binary}, {installation.release_text}"
    if not installation.is_safe:
        fix = "to open Triton's own ports to other machines, use tritonserver 26.07 or later"
        return MachineCheck(
            name, "info", f"{found}: one request can crash it, so it listens on loopback only", fix
        )
    return MachineCheck(name, "ok", found)


def _containers() -> MachineCheck:
    found = [tool for tool in ("docker", "podman", "buildah", "skopeo") if shutil.which(tool)]
    if found:
        return MachineCheck("Containers", "ok", ", ".join(found))
    return MachineCheck("Containers", "info", "no docker or podman", "apt install podman")


def _memory() -> MachineCheck:
    """Report how much memory there is, and whether that is enough for the released model on a CPU."""
    from canvasrt import machine
    from canvasrt.build.fit import released_fit
    from canvasrt.targets import find_target

    there, fit = machine.memory_bytes(), released_fit(find_target("cpu"))
    assert fit is not None
    need = f"the released model takes {size(fit.memory.total)} on a CPU, in {fit.precision}"
    if fit.memory.total > there:
        return MachineCheck("Memory", "info", f"{size(there)}, too little for a CPU: {need}")
    return MachineCheck("Memory", "ok", f"{size(there)}; {need}")


def _disk() -> MachineCheck:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{size(free)} free in {Path.cwd()}"
    if free < _ENOUGH_DISK:
        return MachineCheck(
            "Disk", "gap", found, "free some space, or work in a folder on another disk"
        )
    return MachineCheck("Disk", "ok", found)


def _shared_memory() -> MachineCheck:
    name = "Shared memory"
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return MachineCheck(name, "gap", "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    if free < _ENOUGH_SHARED:
        fix = "mount -o remount,size=1g /dev/shm (in a container: --shm-size 1g)"
        return MachineCheck(name, "gap", f"{size(free)} free in /dev/shm; Triton needs more", fix)
    return MachineCheck(name, "ok", f"{size(free)} free in /dev/shm")
