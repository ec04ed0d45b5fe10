"""Builds the image of a package on a base image, without a daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canvasrt.bundle import Bundle, Manifest, load_bundle
from canvasrt.containers.image import virtualenv
from canvasrt.containers.image.attest import Materials, attest, read_signer
from canvasrt.containers.image.base import Base, read_base
from canvasrt.containers.image.blobs import Blobs, ImageLayer, LayerEntry, entries_of
from canvasrt.containers.image.contents import contents
from canvasrt.containers.image.oci_layout import Image, check_tag, write_archive, write_layout
from canvasrt.containers.names import ENGINES, IMAGE_FOLDER, MODEL_REPOSITORY, PACKAGE, SBOM
from canvasrt.containers.package import bindings, releases, wheels
from canvasrt.containers.package.image_settings import CACHE, USER, architecture_of, settings_for
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.package import backends_of, package
from canvasrt.containers.package.requirements import canonical_name, read_requirements
from canvasrt.errors import CanvasError
from canvasrt.progress import counter, report
from canvasrt.staging import check_output, scratch, staging, sync

IMAGE_FORMATS = ("oci", "docker")
_INSIDE = PACKAGE.lstrip("/")


@dataclass(frozen=True)
class WrittenImage:
    """A written image, and the manifest of its content."""

    image: Image
    manifest: Manifest
    format: str

    @property
    def engine_bytes(self) -> int:
        """Total size in bytes of the engines that were added to the base."""
        return sum(
            entry["bytes"]
            for name, entry in self.manifest.files.items()
            if name.startswith(f"{ENGINES}/")
        )

    @property
    def other_bytes(self) -> int:
        """Total size in bytes of everything else that was added to the base: code and its dependencies."""
        return self.image.added_bytes - self.engine_bytes


def write_image(
    source: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    format: str,
    base: Path,
    options: PackageOptions,
    key: Path | None = None,
) -> WrittenImage:
    """Write the image of bundles to `out`: an OCI layout (a folder) or a docker archive (a file).

    With a private `key`, signed provenance is written next to the image.

    Raises CanvasError if a wheel is missing, or if `package` or `read_base` fails. In that case nothing is written.
    """
    out = Path(out).expanduser().resolve()
    check_output(out)
    signer = None if key is None else read_signer(key)
    paths = [source] if isinstance(source, (str, Path)) else list(source)
    manifests = [load_bundle(path, check=False).manifest for path in paths]
    opened = read_base(base, architecture_of(manifests))
    report("reading the base's packages")
    options = replace(options_for(opened, options), fetch=True, contents=contents(opened))
    _check_tensorrt(manifests, options)
    with scratch(out.with_name(out.name + ".context")) as context:
        made = package(
            source,
            context / "package",
            options=options,
        )
        report("fetching wheels")
        pins = read_requirements(made.path)
        fetched = [*wheels.fetch(pins, options.python, opened.architecture).values()]
        with _destination(out, format, options.tag) as layout:
            layers = _layers(layout, made, opened, options, fetched)
            settings = settings_for(manifests).to_config()
            # OCI's labels that identify an image's base.
            based_on = {"name": opened.tag, "digest": opened.digest}
            settings["Labels"] |= {
                f"org.opencontainers.image.base.{name}": text
                for name, text in based_on.items()
                if text
            }
            report("checking the base image")
            image = write_layout(layout, opened, Blobs(layout), layers, settings, options.tag)
        inside = (made.path / IMAGE_FOLDER / "manifest.json").read_text(encoding="utf-8")
    image = replace(image, path=out)
    if signer is not None:
        attest(image, format, Materials(opened, manifests, pins, options), signer)
    return WrittenImage(image, Manifest(json.loads(inside)), format)


def options_for(base: Base, options: PackageOptions) -> PackageOptions:
    """Return the options, completed with the base image's name, digest and versions."""
    return replace(
        options,
        base=base.names[0] if base.names else f"{base.path.name}@{base.digest}",
        base_digest=base.digest.removeprefix("sha256:"),
        tag=check_tag(options.tag),
        architecture=base.architecture,
        python=_interpreter(base)[1],
        tensorrt=releases.tensorrt_of(base.environment, base.names),
    )


def _interpreter(base: Base) -> tuple[str, str]:
    """Return Python's path and version. For NVIDIA's images, this reads no layers."""
    known = releases.python_of(base.environment)
    return ("/usr/bin/python3", known) if known else base.python


def _check_tensorrt(manifests: Sequence[Manifest], options: PackageOptions) -> None:
    """Raise CanvasError if the bindings need the base's TensorRT version, but that version is not known."""
    if "tensorrt" in backends_of(manifests, options.tensorrt) and options.tensorrt is None:
        raise CanvasError(
            f"the TensorRT version of {options.base} is not known, but is needed to build engines from the graphs",
            "use an NVIDIA image, which sets TRT_VERSION, or --format context",
        )


@contextlib.contextmanager
def _destination(out: Path, format: str, tag: str) -> Iterator[Path]:
    """Yield a folder for the layout. At the end, the folder or an archive of it is moved to `out`."""
    if format == "oci":
        with staging(out) as folder:
            yield folder
        return
    with scratch(out) as folder:
        layout = folder / "layout"
        layout.mkdir()
        yield layout
        write_archive(layout, tag, folder / "archive")
        if out.is_dir():  # check_output has made sure that the folder is empty
            out.rmdir()
        sync(folder / "archive")
        os.replace(folder / "archive", out)


def _layers(
    layout: Path,
    made: Bundle,
    base: Base,
    options: PackageOptions,
    fetched: Sequence[Path],
) -> list[ImageLayer]:
    """Write our layers. The layers that change least often come first."""
    blobs = Blobs(layout)
    own = next((made.path / "wheels").glob("canvasrt-*.whl"))
    interpreter = _interpreter(base)[0]
    layers = []
    with tempfile.TemporaryDirectory(dir=layout.parent) as scratch_folder:
        for number, (what, found) in enumerate(
            (("python packages", list(fetched)), ("canvasrt", [own]))
        ):
            report(f"writing the layer of {what}")
            folder = Path(scratch_folder) / str(number)
            virtualenv.unpack(found, folder, options.python)
            entries = list(entries_of(folder, virtualenv.VENV, skip=virtualenv.is_left_out))
            if number == 0:
                entries += virtualenv.venv_entries(interpreter, options.python)
                cache = CACHE.lstrip("/")  # with its parent folder, which the base image lacks
                entries += [LayerEntry(os.path.dirname(cache)), LayerEntry(cache, owner=USER)]
                entries += _tensorrt(found, options.python)
            layers.append(blobs.add_layer(entries, f"canvasrt package: {what}", compress=True))
            shutil.rmtree(folder)
    if options.engines == "copy":
        for place in made.manifest.made_from:
            layers.append(_engine_layer(blobs, made, place))
    rest = [
        *entries_of(made.path / MODEL_REPOSITORY, f"{_INSIDE}/{MODEL_REPOSITORY}"),
        LayerEntry(f"{_INSIDE}/{SBOM}", made.path / SBOM),
        LayerEntry(f"{_INSIDE}/manifest.json", made.path / IMAGE_FOLDER / "manifest.json"),
    ]
    layers.append(blobs.add_layer(rest, "canvasrt package: model repository", compress=True))
    return layers


def _engine_layer(blobs: Blobs, made: Bundle, place: str) -> ImageLayer:
    entries = list(entries_of(made.path / place, f"{_INSIDE}/{place}"))
    total = sum(entry.source.stat().st_size for entry in entries if entry.source)
    count = counter(f"writing the layer of {place}", total)
    return blobs.add_layer(entries, f"canvasrt package: {place}", compress=False, count=count)


def _tensorrt(found: Sequence[Path], python: str) -> list[LayerEntry]:
    """Return the files of the module that wraps TensorRT's bindings, if the bindings are among the wheels."""
    names = [wheel.name.split("-") for wheel in found]
    version = next(
        (each[1] for each in names if canonical_name(each[0]) == bindings.DISTRIBUTION), None
    )
    site = f"{virtualenv.VENV}/lib/python{python}/site-packages"
    files = bindings.module_files(version).items() if version else ()
    return [LayerEntry(f"{site}/{name}", content=content) for name, content in files]
