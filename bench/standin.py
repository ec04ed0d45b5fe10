"""A base image for machines that cannot pull NVIDIA's: a minimal Debian with nvidia-pytriton's
tritonserver.

It is enough on a machine without a GPU. `make image-demo` and the tests build images on it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

from canvasrt.cache import cache_folder
from canvasrt.containers.image.base import Base
from canvasrt.containers.image.blobs import Blobs, LayerEntry, entries_of
from canvasrt.containers.image.oci_layout import write_layout
from canvasrt.containers.names import ARCHITECTURES
from canvasrt.errors import CanvasError
from canvasrt.extras import version
from canvasrt.staging import staging

STANDIN_TAG = "canvasrt-standin:bookworm"
SUITE = "bookworm"
# `docker build` needs pip; the stub of Triton's Python backend loads libpython.
_PACKAGES = ("python3", "python3-pip", "libpython3.11")
_LEFT_OUT = ("doc", "man", "locale", "info", "lintian")
# The folder of the wheel's files, in the layout that they expect. /opt/tritonserver, their path in NVIDIA's image,
# links to them.
_TRITON = "opt/triton"
_PYTHON = "3.11"
_STUB = "triton_python_backend_stub"


def standin() -> Path:
    """Return the OCI layout of this base image. The first call creates it from Debian's mirror, in about half a minute.

    Raises CanvasError if mmdebstrap or nvidia-pytriton is missing.
    """
    if shutil.which("mmdebstrap") is None:
        raise CanvasError("mmdebstrap is not installed", "run `apt-get install mmdebstrap`")
    triton = _triton()
    content = repr((SUITE, _PACKAGES, version("nvidia-pytriton"), platform.machine(), 2))
    out = cache_folder() / "bases" / hashlib.sha256(content.encode()).hexdigest()[:16]
    if not (out / "index.json").exists():
        _write(out, triton)
    return out


def _write(out: Path, triton: Path) -> None:
    root = out.with_name(f"{out.name}.{os.getpid()}.tar")
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        _debian(root)
        with staging(out) as folder:
            blobs = Blobs(folder)
            debian = blobs.add_archive(root, f"mmdebstrap {SUITE}")
            server = blobs.add_layer(
                _server(triton), "nvidia-pytriton", compress=True, above=_TRITON
            )
            path = "/opt/tritonserver/bin:$PATH"
            settings = {"Env": {"PATH": path}, "Cmd": ["tritonserver"]}
            write_layout(folder, _empty(out), blobs, (debian, server), settings, STANDIN_TAG)
    finally:
        root.unlink(missing_ok=True)


def _debian(root: Path) -> None:
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT]
    command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", *excluded]
    done = subprocess.run(
        [*command, SUITE, str(root)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "SOURCE_DATE_EPOCH": "0"},
    )
    if done.returncode != 0:
        raise CanvasError(
            f"mmdebstrap failed: {(done.stderr.splitlines() or ['no output'])[-1]}",
            "mmdebstrap needs root (or user namespaces) and Debian's mirror",
        )


def _empty(path: Path) -> Base:
    """Return an image without layers."""
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": []},
        "history": [],
    }
    return Base(path, config, (), "")


def _triton() -> Path:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise CanvasError("nvidia-pytriton is not installed", "run `pip install 'canvasrt[serve]'`")
    return Path(spec.origin).parent / "tritonserver"


def _server(triton: Path) -> list[LayerEntry]:
    """Return the files of the server, its libraries, and the Python backend's stub for Debian's Python."""
    stub = f"pytriton/stubs/stubs/{_PYTHON}/{_STUB}"
    libraries = (
        triton.parent.parent / "nvidia_pytriton.libs"
    )  # where the wheel's files look for them
    return [
        *_tree(triton, "pytriton/tritonserver", "python_backend_stubs"),
        *_tree(libraries, libraries.name),
        LayerEntry(
            f"{_TRITON}/{stub}", triton / "python_backend_stubs" / _PYTHON / _STUB, executable=True
        ),
        LayerEntry(
            f"{_TRITON}/pytriton/tritonserver/backends/python/{_STUB}", link=f"/{_TRITON}/{stub}"
        ),
        LayerEntry(
            "opt/tritonserver", link=f"{_TRITON.removeprefix('opt/')}/pytriton/tritonserver"
        ),
    ]


def _tree(folder: Path, place: str, left_out: str = "__pycache__") -> list[LayerEntry]:
    def skip(name: str) -> bool:
        return name.startswith(left_out) or "__pycache__" in name

    return list(entries_of(folder, f"{_TRITON}/{place}", skip=skip))
