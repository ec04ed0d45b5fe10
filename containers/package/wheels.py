"""Downloads wheels for another machine with pip."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from canvasrt.cache import cache_folder
from canvasrt.containers.names import MACHINES
from canvasrt.containers.package.requirements import Pin, canonical
from canvasrt.errors import CanvasError

# tritonserver itself needs glibc 2.35, so every image has at least that.
_GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")


def fetch(pins: Sequence[Pin], python: str, architecture: str) -> list[Path]:
    """Return the wheels of `pins` for a Linux machine, from the cache, else from the package index.

    CanvasError when pip is missing, or cannot find a version.
    """
    folder = cache_folder() / "wheels" / f"cp{python.replace('.', '')}-{architecture}"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [pin for pin in pins if _find(folder, pin) is None]
    if missing:
        _download(missing, folder, python, architecture)
    found = {pin: _find(folder, pin) for pin in pins}
    for pin in [pin for pin, wheel in found.items() if wheel is None]:
        _build(pin, folder)
        found[pin] = _find(folder, pin)
        if found[pin] is None:
            raise CanvasError(
                f"there is no wheel of {pin} for Python {python} on {architecture}",
                f"put one into {folder}, or use --format context and build the image on such a machine",
            )
    return [wheel for wheel in found.values() if wheel is not None]


def _find(folder: Path, pin: Pin) -> Path | None:
    for wheel in sorted(folder.glob("*.whl")):
        name, version, *_ = wheel.name.split("-")
        if canonical(name) == pin.name and version == _escaped(pin.version):
            return wheel
    return None


def _escaped(version: str) -> str:
    return re.sub(r"[^\w.+!]+", "_", version)


def _download(pins: Sequence[Pin], folder: Path, python: str, architecture: str) -> None:
    machine = MACHINES[architecture]
    tags = [*(f"manylinux_2_{minor}" for minor in _GLIBC), *_LEGACY]
    platforms = [part for tag in tags for part in ("--platform", f"{tag}_{machine}")]
    command = ["download", "--no-deps", "--only-binary", ":all:", "--implementation", "cp"]
    command += ["--python-version", python, *platforms, "--dest", str(folder)]
    failed = _pip(command, [str(pin) for pin in pins])
    if not failed:
        return
    # pip stops at the first failure; one at a time shows which wheels are missing.
    for pin in pins:
        if _find(folder, pin) is None:
            _pip(command, [str(pin)])


def _build(pin: Pin, folder: Path) -> None:
    """Build a wheel of a distribution that only has sources; only pure Python suits any machine."""
    scratch = folder / f".{pin.name}"
    failed = _pip(["wheel", "--no-deps", "--wheel-dir", str(scratch)], [str(pin)])
    wheels = list(scratch.glob("*.whl")) if scratch.exists() else []
    for wheel in wheels:
        if wheel.name.endswith("-none-any.whl"):
            wheel.rename(folder / wheel.name)
        else:
            wheel.unlink()
    if scratch.exists():
        scratch.rmdir()
    if failed:
        raise CanvasError(
            f"pip cannot get {pin}: {failed}",
            "connect to a package index (pip's settings apply), or fill"
            f" {folder} on a machine that can reach one",
        )


def _pip(command: Sequence[str], wanted: Sequence[str]) -> str:
    """Run pip; return its error, or an empty string."""
    if platform.system() != "Linux":
        raise CanvasError(
            "images can only be written on Linux", "use --format context on this machine"
        )
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *command, *wanted],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return ""
    if "No module named pip" in done.stderr:
        raise CanvasError("pip is not installed here", "run `python -m ensurepip`")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return (errors or done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
