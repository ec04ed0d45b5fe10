"""The Python environment of an image: wheels unpacked as pip would install them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from canvasrt.containers.image.blobs import LayerEntry
from canvasrt.extras import require

VENV = "opt/canvasrt/venv"


def unpack(wheels: Sequence[Path], folder: Path, python: str) -> None:
    """Install wheels into `folder`/lib and `folder`/bin, as pip would in the image."""
    installer = require("installer", "serve")
    from installer.destinations import SchemeDictionaryDestination
    from installer.sources import WheelFile

    site = folder / "lib" / f"python{python}" / "site-packages"
    scheme = {
        "purelib": str(site),
        "platlib": str(site),
        "scripts": str(folder / "bin"),
        "headers": str(folder / "include"),
        "data": str(folder),
    }
    destination = SchemeDictionaryDestination(
        scheme, interpreter=f"/{VENV}/bin/python3", script_kind="posix"
    )
    with warnings.catch_warnings():
        # The library `installer` warns about compiled files in wheels, and does not install them.
        warnings.simplefilter("ignore", RuntimeWarning)
        for wheel in wheels:
            with WheelFile.open(wheel) as source:
                installer.install(source, destination, {"INSTALLER": b"canvasrt\n"})


def venv_entries(interpreter: str, python: str) -> list[LayerEntry]:
    """Return the files of a virtual environment for the image's Python."""
    home = interpreter.rpartition("/")[0]
    settings = f"home = {home}\ninclude-system-site-packages = false\nversion = {python}\n"
    return [
        LayerEntry(f"{VENV}/pyvenv.cfg", content=settings.encode()),
        LayerEntry(f"{VENV}/bin/python3", link=interpreter),
        LayerEntry(f"{VENV}/bin/python", link="python3"),
    ]


def is_left_out(name: str) -> bool:
    """Return whether the image omits a file that `unpack` wrote, since it is a C header or a compiled file."""
    return name.startswith("include") or "__pycache__" in name
