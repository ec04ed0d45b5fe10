"""TensorRT's Python module for an image that has TensorRT's libraries.

NVIDIA's `tensorrt` on PyPI fetches those libraries a second time, from an index of NVIDIA's own. The bindings are
on PyPI as they are, under another name: this writes the module `tensorrt` that leads to them.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

DISTRIBUTION = "tensorrt-cu13-bindings"
_MODULE = "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"


def module_files(version: str) -> dict[str, bytes]:
    """The module and its metadata, by their places in site-packages."""
    info = f"tensorrt-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n"
    return {
        "tensorrt/__init__.py": _MODULE.encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/INSTALLER": b"canvasrt\n",
        f"{info}/RECORD": f"tensorrt/__init__.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n".encode(),
    }


def main(version: str) -> None:
    """Writes them into this interpreter's environment: for a Dockerfile."""
    if not re.fullmatch(r"\d+(\.\d+){3}", version):
        sys.exit(f"error: the base says no version of TensorRT in TRT_VERSION, but {version!r}")
    site = Path(sysconfig.get_path("purelib"))
    for name, content in module_files(version).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1])
