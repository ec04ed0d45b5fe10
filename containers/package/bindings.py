"""TensorRT's Python module for an image that already has TensorRT's libraries.

NVIDIA's distribution `tensorrt` on PyPI would download the libraries again, from NVIDIA's own index. Another
distribution on PyPI contains only the bindings; this file writes a module `tensorrt` that imports the bindings.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

from canvasrt.errors import CanvasError

DISTRIBUTION = "tensorrt-cu13-bindings"
_MODULE = "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"


def module_files(version: str) -> dict[str, bytes]:
    """Return the files of the module and its metadata, keyed by path in site-packages."""
    info = f"tensorrt-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n"
    return {
        "tensorrt/__init__.py": _MODULE.encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/INSTALLER": b"canvasrt\n",
        f"{info}/RECORD": f"tensorrt/__init__.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n".encode(),
    }


def main(version: str) -> None:
    """Write the module into this interpreter's environment; a Dockerfile calls this."""
    if not re.fullmatch(r"\d+(\.\d+){3}", version):
        raise CanvasError(
            f"TRT_VERSION of the base is {version!r}, which is not a version of TensorRT",
            "give --base an image that sets TRT_VERSION to TensorRT's version, as NVIDIA's images do",
        )
    site = Path(sysconfig.get_path("purelib"))
    for name, content in module_files(version).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1])
