"""Finds what to deploy: a package's folder, an OCI layout, a docker archive, or an image by name."""

from __future__ import annotations

import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from canvasrt.bundle import MANIFEST, load_bundle
from canvasrt.containers.deploy.container_engine import ContainerEngine, last_line
from canvasrt.containers.image.base import read_base
from canvasrt.containers.image.oci_layout import write_archive
from canvasrt.containers.names import ENGINES
from canvasrt.errors import CanvasError
from canvasrt.staging import scratch


@dataclass(frozen=True)
class Package:
    """An image, or a folder to build one from. `path` is None for an image that is already loaded."""

    tag: str
    path: Path | None
    kind: str  # one of context, oci, docker, image
    labels: Mapping[str, str]
    architecture: str | None
    engines: Path | None = None  # engines to mount if the image does not include them

    @property
    def needs_gpu(self) -> bool:
        """Whether any target needs a GPU. Graphs in fp32 run on a CPU."""
        targets = self.labels.get("canvasrt.target", "cpu").split(",")
        precisions = self.labels.get("canvasrt.precision", "").split(",")
        pairs = zip_longest(targets, precisions)
        return any(each[0] != "cpu" and each != ("graphs", "fp32") for each in pairs)


def open_package(package: str, engine: ContainerEngine | None) -> Package:
    """Return the package at the path `package`; if the path has no package, the image of this name in `engine`."""
    path = Path(package).expanduser()
    if (path / MANIFEST).is_file():
        return _context(path)
    if (path / "index.json").is_file():
        image = read_base(path)
        return Package(image.tag, path, "oci", image.labels, image.architecture)
    if path.is_file() and tarfile.is_tarfile(path):
        image = read_base(path)
        return Package(image.tag, path, "docker", image.labels, image.architecture)
    known = engine.inspect("image", package) if engine else None
    if known is None:
        raise CanvasError(
            f"{package} is neither a package nor the name of an image",
            "give a folder or an archive that `canvasrt package` wrote",
        )
    labels = (known.get("Config") or {}).get("Labels") or known.get("Labels") or {}
    return Package(package, None, "image", labels, known.get("Architecture"))


def load(package: Package, engine: ContainerEngine) -> None:
    """Build the image or load it into the container engine. Raises CanvasError if that fails."""
    if package.path is None:
        return
    words = load_words(package)
    if package.kind == "oci":
        with scratch(package.path.resolve().with_name(f"{package.path.name}.load")) as folder:
            write_archive(package.path, package.tag, folder / "archive")
            done = engine.run("load", "--input", str(folder / "archive"))
    else:
        done = engine.run(*words)
    if done.returncode != 0:
        raise CanvasError(
            f"{engine.name} cannot {words[0]} {package.path}: {last_line(done.stderr)}",
            f"run it yourself: {shlex.join([engine.name, *words])}"
            if package.kind == "context"
            else "check it with `canvasrt verify`, and check the free space on its disk",
        )


def load_words(package: Package) -> list[str]:
    """Return the container engine's arguments that build a folder's image, or load an archive."""
    if package.kind == "context":
        return ["build", "--tag", package.tag, str(package.path)]
    return ["load", "--input", str(package.path)]


def _context(path: Path) -> Package:
    bundle = load_bundle(path, kind="package", check=False)
    options = bundle.manifest.options
    mounted = path / ENGINES if options.get("engines") == "mount" else None
    return Package(
        options["image"]["tag"],
        path,
        "context",
        options["image"]["labels"],
        options["image"]["architecture"],
        mounted.resolve() if mounted else None,
    )
