"""Checks an image: every blob, every file of the package in it, and its bill of materials."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from canvasrt.bundle import MANIFEST, Bundle, Manifest
from canvasrt.containers.image.base import Base, BaseLayer, read_base
from canvasrt.containers.names import IMAGE, PACKAGE
from canvasrt.containers.package.sbom import SBOM
from canvasrt.errors import CanvasError
from canvasrt.progress import Progress, no_progress

_INSIDE = PACKAGE.lstrip("/") + "/"
_AGAIN = "the image is damaged or was edited: make it again, or copy it again"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Verified:
    """What was checked."""

    manifest: Manifest
    layers: int
    bytes: int
    components: int


def is_image(path: Path) -> bool:
    """Whether a path is an OCI layout or an archive, and not a bundle."""
    if (path / MANIFEST).is_file() and not (path / "index.json").is_file():
        return False
    return (path / "index.json").is_file() or (path.is_file() and tarfile.is_tarfile(path))


def verify_image(path: Path, progress: Progress = no_progress) -> Verified:
    """Checks the image at `path`. CanvasError names what differs from what it says."""
    base = read_base(path)
    ids = base.config["rootfs"]["diff_ids"]
    if len(ids) != len(base.layers):
        raise CanvasError(f"{path} has {len(base.layers)} layers and {len(ids)} digests", _AGAIN)
    found: dict[str, str] = {}
    kept: dict[str, bytes] = {}
    done = 0
    for layer, diff_id in zip(base.layers, ids, strict=True):
        _check_layer(base, layer, diff_id, found, kept)
        done += layer.size
        progress("checking layers", done, base.size)
    if MANIFEST not in kept:
        raise CanvasError(
            f"there is no package in the image {path}",
            "`canvasrt package --format oci` or `docker` writes images with one",
        )
    manifest = Manifest(json.loads(kept[MANIFEST]))
    for name, entry in manifest.files.items():
        if found.get(name) != entry["sha256"]:
            what = "is missing" if name not in found else "differs from the manifest (SHA-256)"
            raise CanvasError(f"{PACKAGE}/{name} in {path} {what}", _AGAIN)
    components = check_sbom(json.loads(kept[SBOM]), manifest.files, str(path))
    return Verified(manifest, len(base.layers), base.size, components)


def check_package(bundle: Bundle) -> None:
    """The same for a package's folder, whose files' hashes were checked when it was loaded."""
    if bundle.manifest.kind != "package" or SBOM not in bundle.manifest.files:
        return
    inside = json.loads((bundle.path / IMAGE / MANIFEST).read_text(encoding="utf-8"))["files"]
    for name, entry in inside.items():
        if bundle.manifest.files.get(name) != entry:
            raise CanvasError(f"{bundle.path / name} differs from {IMAGE}/{MANIFEST}", _AGAIN)
    check_sbom(
        json.loads((bundle.path / SBOM).read_text(encoding="utf-8")), inside, str(bundle.path)
    )


def check_sbom(bom: Mapping[str, Any], files: Mapping[str, Any], where: str) -> int:
    """Whether a bill of materials names just these files, by their hashes; how much it lists."""
    listed = {
        each["name"]: each["hashes"][0]["content"]
        for each in bom["components"]
        if each["type"] == "file"
    }
    expected = {name: entry["sha256"] for name, entry in files.items() if name != SBOM}
    for name in sorted(listed.keys() | expected.keys()):
        if listed.get(name) != expected.get(name):
            raise CanvasError(f"the bill of materials of {where} disagrees about {name}", _AGAIN)
    return len(bom["components"])


def _check_layer(
    base: Base, layer: BaseLayer, diff_id: str, found: dict[str, str], kept: dict[str, bytes]
) -> None:
    """Hashes a layer as it is stored and as it unpacks; notes the package's files in it."""
    with layer.file.open("rb") as file:
        file.seek(layer.offset)
        stored = _Hashed(file, layer.size)
        packed = layer.media_type.endswith("+gzip")
        stream = cast(
            IO[bytes], gzip.GzipFile(fileobj=cast(IO[bytes], stored)) if packed else stored
        )
        content = _Hashed(stream, None)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], content), mode="r|") as archive:
                _note(archive, found, kept)
            for _ in iter(lambda: content.read(_CHUNK), b""):
                pass
            for _ in iter(lambda: stored.read(_CHUNK), b""):
                pass
        except (tarfile.TarError, OSError, EOFError) as error:
            raise CanvasError(
                f"the layer {layer.digest} of {base.path} is damaged", _AGAIN
            ) from error
    if stored.digest != layer.digest or content.digest != diff_id:
        raise CanvasError(f"the layer {layer.digest} of {base.path} has another content", _AGAIN)


def _note(archive: tarfile.TarFile, found: dict[str, str], kept: dict[str, bytes]) -> None:
    for member in archive:
        name = member.name.removeprefix("./")
        if not name.startswith(_INSIDE) or not member.isfile():
            continue
        file = archive.extractfile(member)
        assert file is not None
        inside = name.removeprefix(_INSIDE)
        digest = hashlib.sha256()
        for chunk in _chunks(file):
            digest.update(chunk)
            if inside in (MANIFEST, SBOM):
                kept[inside] = kept.get(inside, b"") + chunk
        found[inside] = digest.hexdigest()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


class _Hashed:
    """A file for reading, to an end, that hashes what is read."""

    def __init__(self, file: IO[bytes], size: int | None) -> None:
        self._file = file
        self._left = size
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def read(self, size: int = -1) -> bytes:
        if self._left is not None:
            size = self._left if size < 0 else min(size, self._left)
        data = self._file.read(size)
        if self._left is not None:
            self._left -= len(data)
        self._hash.update(data)
        return data
