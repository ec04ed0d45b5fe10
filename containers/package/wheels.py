"""The wheels that packages install: their hashes, and downloads by pip for another machine."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from canvasrt.cache import cache_folder
from canvasrt.containers.names import MACHINES
from canvasrt.containers.package.requirements import Pin, canonical_name
from canvasrt.errors import CanvasError
from canvasrt.hashes import hash_files
from canvasrt.staging import scratch

# The SHA-256 of every wheel that packages install, by platform. `.ci/lock-images` updates it from the package index.
LOCK = Path(__file__).parent / "lock.json"
# tritonserver needs glibc 2.35, so every image has at least that version.
_GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")


class Locked(NamedTuple):
    """A wheel of the package index."""

    file: str
    sha256: str


def locked(pin: Pin, python: str, architecture: str) -> Locked | None:
    """Return a distribution's wheel for a platform; None if the table of hashes lacks it."""
    found = _table().get(f"cp{python}-{architecture}", {}).get(str(pin))
    return Locked(*found) if found else None


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    return json.loads(LOCK.read_text(encoding="utf-8"))


def fetch(pins: Sequence[Pin], python: str, architecture: str) -> dict[Pin, Path]:
    """Return the wheels of `pins` for a Linux machine, from the cache or the package index.

    Raises CanvasError if pip is missing or cannot find a version, or if a wheel's hash differs from the table of
    hashes.
    """
    folder = cache_folder() / "wheels" / f"cp{python.replace('.', '')}-{architecture}"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [pin for pin in pins if _find(folder, pin) is None]
    if missing:
        _download(missing, folder, python, architecture)
    found = {}
    for pin in pins:
        wheel = _find(folder, pin)
        if wheel is None:
            _build(pin, folder)
            wheel = _find(folder, pin)
        if wheel is None:
            raise CanvasError(
                f"{pin} has no wheel for Python {python} on {architecture}",
                f"put one into {folder}, or use --format context and build the image on a machine of that architecture",
            )
        _check(pin, wheel, python, architecture)
        found[pin] = wheel
    return found


def with_hashes(
    pins: Sequence[Pin],
    fetched: Mapping[Pin, Path],
    python: str,
    architecture: str,
    others: Iterable[str] = (),
) -> list[Pin]:
    """Return the pins with their wheels' hashes. Fetched wheels are hashed here; for other pins, the hash comes from
    the table of hashes. `others`: further architectures, whose hashes are added from the table."""
    found = []
    for pin in pins:
        known = locked(pin, python, architecture)
        wheel = fetched.get(pin)
        own = hash_files(wheel.parent, [wheel.name])[wheel.name] if wheel else ""
        known_others = [each.sha256 for name in others if (each := locked(pin, python, name))]
        sha256 = own or (known.sha256 if known else "")
        more = tuple(each for each in known_others if each != sha256)
        found.append(replace(pin, sha256=sha256, others=more))
    return found


def _check(pin: Pin, wheel: Path, python: str, architecture: str) -> None:
    """Raise CanvasError if a wheel's hash differs from the table of hashes."""
    known = locked(pin, python, architecture)
    if known is None or known.file != wheel.name:
        return
    if hash_files(wheel.parent, [wheel.name])[wheel.name] != known.sha256:
        raise CanvasError(
            f"{wheel} is not the wheel of {pin} in the package index: its SHA-256 differs",
            "delete it, and package again; if that does not help, somebody replaced the wheel",
        )


def _find(folder: Path, pin: Pin) -> Path | None:
    for wheel in sorted(folder.glob("*.whl")):
        name, version, *_ = wheel.name.split("-")
        if canonical_name(name) == pin.name and version == re.sub(r"[^\w.+!]+", "_", pin.version):
            return wheel
    return None


def _download(pins: Sequence[Pin], folder: Path, python: str, architecture: str) -> None:
    command = ["download", "--no-deps", *platform_options(python, architecture), "--dest"]
    if not _pip_into(folder, command, pins):
        return
    # pip stops at the first failure. Downloading one by one shows which wheels are missing.
    for pin in pins:
        if _find(folder, pin) is None:
            _pip_into(folder, command, [pin])


def _build(pin: Pin, folder: Path) -> None:
    """Build the wheel of a distribution that is published only as source. The wheel must be pure Python, to run on
    another machine."""
    command = ["wheel", "--no-deps", "--wheel-dir"]
    if failed := _pip_into(folder, command, [pin], "*-none-any.whl"):
        raise CanvasError(
            f"pip cannot get {pin}: {failed}",
            "connect to a package index (pip's settings apply), or fill"
            f" {folder} on a machine that can reach one",
        )


def _pip_into(
    folder: Path, command: Sequence[str], pins: Sequence[Pin], wanted: str = "*.whl"
) -> str:
    """Run pip, and move the `wanted` wheels to `folder` once they are complete; return pip's error, or an empty
    string. `command` ends with the option for pip's output folder."""
    with scratch(folder / "pip") as made:
        failed = _pip([*command, str(made)], [str(pin) for pin in pins])
        for wheel in () if failed else made.glob(wanted):
            wheel.replace(folder / wheel.name)
    return failed


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


def platform_options(python: str, architecture: str) -> list[str]:
    """Return pip's options for wheels for a Python version on `amd64` or `arm64`."""
    machine = MACHINES[architecture]
    names = [*(f"manylinux_2_{minor}" for minor in _GLIBC), *_LEGACY]
    platforms = [part for name in names for part in ("--platform", f"{name}_{machine}")]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    return [*options, *platforms]
