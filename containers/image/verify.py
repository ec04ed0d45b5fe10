"""Checks an image: its blobs, the files of its package, and the bill of materials."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from canvasrt.bundle import MANIFEST, Bundle, Manifest, parse_manifest
from canvasrt.containers.image.attest import check_attestation
from canvasrt.containers.image.base import read_base, signed_digest
from canvasrt.containers.names import IMAGE_FOLDER, PACKAGE, SBOM
from canvasrt.errors import CanvasError
from canvasrt.hashes import DIFFERS
from canvasrt.progress import report

_INSIDE = PACKAGE.lstrip("/") + "/"
_AGAIN = "it is damaged or was edited: write it again, or copy it again"
# Size limit of a manifest or bill of materials, since both are read into memory.
_MAX_DOCUMENT = 4 << 20


@dataclass(frozen=True)
class Verified:
    """The result of a check. `digest`: digest of the manifest or, for a docker archive, of the configuration.
    `components`: number of components in the bill of materials."""

    manifest: Manifest
    digest: str
    layers: int
    bytes: int
    components: int
    provenance: Mapping[str, Any] | None = None


def is_image(path: Path) -> bool:
    """Return whether a path is an OCI layout or an archive, and not a bundle."""
    if (path / MANIFEST).is_file() and not (path / "index.json").is_file():
        return False
    return (path / "index.json").is_file() or (path.is_file() and tarfile.is_tarfile(path))


def verify_image(path: Path, key: Path | None = None) -> Verified:
    """Check the image at `path`. With `key`, check the image's signature before reading any layer. Raises CanvasError
    at the first mismatch."""
    digest = signed_digest(path, alone=key is not None)
    provenance = None if key is None else check_attestation(path, digest, key)
    base = read_base(path)
    if base.digest != digest:
        raise CanvasError(f"the image {path} has more than one manifest", _AGAIN)
    ids = base.config["rootfs"]["diff_ids"]
    found: dict[str, str] = {}
    kept: dict[str, bytes] = {}
    done = 0
    for layer, diff_id in zip(base.layers, ids, strict=True):
        for member, archive in layer.members(diff_id):
            _note(member, archive, found, kept)
        done += layer.size
        report("checking layers", done, base.size)
    if not {MANIFEST, SBOM} <= kept.keys():
        raise CanvasError(
            f"the image {path} contains no package",
            "write one with `canvasrt package --format oci` or `--format docker`",
        )
    manifest = parse_manifest(kept[MANIFEST], path / _INSIDE / MANIFEST)
    for name, entry in manifest.files.items():
        if found.get(name) != entry["sha256"]:
            what = "is missing" if name not in found else DIFFERS
            raise CanvasError(f"{PACKAGE}/{name} in {path} {what}", _AGAIN)
    components = check_sbom(kept[SBOM], manifest.files, str(path))
    return Verified(manifest, digest, len(base.layers), base.size, components, provenance)


def check_package(bundle: Bundle) -> None:
    """Check a package's folder. The files' hashes were already checked when the bundle was loaded."""
    if bundle.manifest.kind != "package" or SBOM not in bundle.manifest.files:
        return
    inside = json.loads((bundle.path / IMAGE_FOLDER / MANIFEST).read_text(encoding="utf-8"))[
        "files"
    ]
    for name, entry in inside.items():
        if bundle.manifest.files.get(name) != entry:
            raise CanvasError(
                f"{bundle.path / name} differs from {IMAGE_FOLDER}/{MANIFEST}", _AGAIN
            )
    check_sbom((bundle.path / SBOM).read_bytes(), inside, str(bundle.path))


def check_sbom(text: bytes, files: Mapping[str, Any], where: str) -> int:
    """Check that a bill of materials lists exactly these files; return its number of components."""
    try:
        components = json.loads(text)["components"]
        listed: dict[str, str] = {
            each["name"]: each["hashes"][0]["content"]
            for each in components
            if each["type"] == "file"
        }
    except (ValueError, LookupError, TypeError, RecursionError):
        raise CanvasError(f"the bill of materials of {where} is damaged", _AGAIN) from None
    expected = {name: entry["sha256"] for name, entry in files.items() if name != SBOM}
    for name in sorted(listed.keys() | expected.keys()):
        if listed.get(name) != expected.get(name):
            raise CanvasError(f"the bill of materials of {where} does not match {name}", _AGAIN)
    return len(components)


def _note(
    member: tarfile.TarInfo,
    archive: tarfile.TarFile,
    found: dict[str, str],
    kept: dict[str, bytes],
) -> None:
    """If a member is a file of the package, add its hash to `found`. Add the content of MANIFEST and SBOM to `kept`."""
    name = member.name.removeprefix("./")
    if not name.startswith(_INSIDE) or not member.isfile():
        return
    inside = name.removeprefix(_INSIDE)
    file = cast(io.BufferedReader, archive.extractfile(member))
    if inside in (MANIFEST, SBOM):
        if member.size > _MAX_DOCUMENT:
            raise CanvasError(
                f"{PACKAGE}/{inside} has {member.size} bytes; the limit is {_MAX_DOCUMENT}", _AGAIN
            )
        kept[inside] = file.read()
        found[inside] = hashlib.sha256(kept[inside]).hexdigest()
    else:
        found[inside] = hashlib.file_digest(file, "sha256").hexdigest()
