"""Writes the installed canvasrt as a reproducible wheel, without a build tool."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zipfile
from pathlib import Path

import canvasrt
from canvasrt.checkpoints.locate import BUNDLED
from canvasrt.errors import CanvasError
from canvasrt.extras import license_text

# In an editable install, these packages are outside the canvasrt folder.
_STAGES = ("export", "build", "runtime", "containers")
_LEFT_OUT = {"__pycache__", *BUNDLED.values()}
_EPOCH = (1980, 1, 1, 0, 0, 0)
_METADATA = (
    "Metadata-Version: 2.4\nName: canvasrt\nVersion: {version}\nLicense-Expression: Apache-2.0\n"
)
_ENTRY_POINTS = "[console_scripts]\ncanvasrt = canvasrt.__main__:main\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: canvasrt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path) -> Path:
    """Write `canvasrt-<version>-py3-none-any.whl` into `folder`.

    It omits the bundled checkpoints, and its metadata omits dependencies, which are in the package's requirements.txt.
    """
    stem = f"canvasrt-{canvasrt.__version__}"
    info = f"{stem}.dist-info"
    content = {name: path.read_bytes() for name, path in sorted(_modules().items())}
    content[f"{info}/METADATA"] = _METADATA.format(version=canvasrt.__version__).encode()
    content[f"{info}/WHEEL"] = _WHEEL.encode()
    content[f"{info}/entry_points.txt"] = _ENTRY_POINTS.encode()
    if text := license_text():
        content[f"{info}/licenses/LICENSE"] = text.encode()
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")

    file = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return file


def _modules() -> dict[str, Path]:
    """Return the installed package's files, keyed by path in the wheel."""
    found: dict[str, Path] = {}
    for package in ("canvasrt", *(f"canvasrt.{stage}" for stage in _STAGES)):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise CanvasError(f"{package} is missing from this install", "install canvasrt again")
        folder = Path(spec.origin).parent
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if path.is_file() and not _LEFT_OUT.intersection(inside.parts):
                found[f"{package.replace('.', '/')}/{inside.as_posix()}"] = path
    return found


def _record(content: dict[str, bytes], own_name: str) -> bytes:
    lines = []
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{own_name},,", ""]).encode()
