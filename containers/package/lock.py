"""The SHA-256 of every file that packages install, by platform, as read from the package index.

`python -m canvasrt.containers.package.lock` reads them again, after versions have changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from canvasrt.containers.package.releases import TENSORRT
from canvasrt.containers.package.requirements import Pin, canonical_name, requirements
from canvasrt.containers.package.tags import platform_options
from canvasrt.errors import CanvasError

FILE = Path(__file__).parent / "lock.json"
_PYTHONS = ("3.11", "3.12")
_ARCHITECTURES = ("amd64", "arm64")


@dataclass(frozen=True)
class Locked:
    """A wheel of the package index."""

    file: str
    sha256: str


def locked(pin: Pin, python: str, architecture: str) -> Locked | None:
    """Return the file of a distribution for a platform; None if the table does not have it."""
    found = _table().get(f"cp{python}-{architecture}", {}).get(str(pin))
    return Locked(*found) if found else None


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def main() -> None:
    """Write the table again, for the versions that are installed here."""
    table = {
        f"cp{python}-{architecture}": _read(_pins(python, architecture), python, architecture)
        for python in _PYTHONS
        for architecture in _ARCHITECTURES
    }
    FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _table.cache_clear()


def _pins(python: str, architecture: str) -> list[Pin]:
    from canvasrt.extras import version

    rtx = {"onnxruntime": None, "tensorrt-rtx": version("tensorrt-rtx")}
    found = requirements(rtx, python, architecture)
    bindings = {each for each in TENSORRT.values() if int(each.partition(".")[0]) >= 11}
    return found + [Pin("tensorrt-cu13-bindings", each) for each in sorted(bindings)]


def _read(pins: Iterable[Pin], python: str, architecture: str) -> dict[str, list[str]]:
    """Return the wheel of each pin; pins without one for this platform are left out."""
    left = {str(pin): pin for pin in pins}
    while True:
        entries, missing = _resolve(list(left), platform_options(python, architecture))
        if missing is None:
            return {
                f"{canonical_name(each['metadata']['name'])}=={each['metadata']['version']}": [
                    each["download_info"]["url"].rpartition("/")[2],
                    each["download_info"]["archive_info"]["hashes"]["sha256"],
                ]
                for each in entries
            }
        del left[missing]


def _resolve(pins: list[str], options: list[str]) -> tuple[list[dict[str, Any]], str | None]:
    """Ask pip which files it would install; also return the first pin without a file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--no-deps", "--target", folder, "--report", str(report), *options, *pins]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return json.loads(report.read_text(encoding="utf-8"))["install"], None
    for line in done.stderr.splitlines():
        missing = line.rpartition("No matching distribution found for ")[2].split(" ")[0]
        if missing in pins:
            return [], missing
    raise CanvasError(f"pip cannot resolve the versions: {done.stderr[-300:]}", "try again")


if __name__ == "__main__":
    main()
