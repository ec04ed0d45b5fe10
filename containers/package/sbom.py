"""The software bill of materials of a package, in CycloneDX. It is reproducible."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cyclonedx.exception.factory import CycloneDxFactoryException
from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

import canvasrt
from canvasrt.bundle import Manifest
from canvasrt.containers.package.image_settings import checkpoint_hash, created, target_name
from canvasrt.containers.package.requirements import Installed, Pin

_NAMESPACE = uuid.UUID("6c1ef1a1-6f2c-5d0e-9b43-7b4a1c0b6a55")


def write_sbom(
    file: Path,
    bundles: Sequence[Manifest],
    pins: Iterable[Pin],
    files: Mapping[str, Any],
    base: str,
    contents: Sequence[Installed] = (),
    base_digest: str = "",
    own: str = "",
) -> None:
    """Write the list of distributions, models and `files` (name → entry with `sha256`) in an image.

    `contents` are the packages in the base image, if it was read; `base_digest` is that image's SHA-256, if known.
    `own` is the SHA-256 of canvasrt's wheel.
    """
    whole = Component(
        name="canvasrt",
        version=canvasrt.__version__,
        type=ComponentType.APPLICATION,
        bom_ref="canvasrt",
        hashes=_hashed(own),
        licenses=_licenses("Apache-2.0"),
    )
    pins = list(pins)
    libraries = [_library(pin) for pin in pins]
    bom = Bom(
        components=[
            *libraries,
            *map(_model, bundles),
            _base(base, contents, base_digest),
            *map(_file, files.items()),
        ],
        metadata=BomMetaData(
            component=whole, timestamp=datetime.fromisoformat(created().replace("Z", "+00:00"))
        ),
        serial_number=uuid.uuid5(
            _NAMESPACE,
            repr(
                (
                    sorted(files.items()),
                    [pin.line for pin in pins],
                    base,
                    base_digest,
                    [*map(str, contents)],
                    own,
                )
            ),
        ),
    )
    bom.register_dependency(whole, libraries)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def _library(pin: Pin) -> Any:
    return Component(
        name=pin.name,
        version=pin.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"pypi:{pin}",
        purl=PackageURL("pypi", name=pin.name, version=pin.version),
        licenses=_licenses(pin.license),
        hashes=_hashed(pin.sha256),
    )


def _licenses(text: str) -> list[Any]:
    """Return a licence as an SPDX expression if `text` is an expression, otherwise as a name."""
    if not text:
        return []
    try:
        return [LicenseFactory().make_from_string(text)]
    except (CycloneDxFactoryException, ValueError):
        return [DisjunctiveLicense(name=text)]


def _model(manifest: Manifest) -> Any:
    facts = {
        "target": target_name(manifest),
        "precision": str(manifest.options.get("precision", "")),
        "checkpoint": checkpoint_hash(manifest),
        **{f"made_by:{name}": version for name, version in manifest.made_by.items()},
    }
    return Component(
        name=f"engines-{target_name(manifest)}",
        version=manifest.made_by["canvasrt"],
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=f"bundle:{manifest.digest}",
        hashes=_hashed(manifest.digest),
        properties=[Property(name=f"canvasrt:{name}", value=text) for name, text in facts.items()],
    )


def _base(name: str, contents: Sequence[Installed], digest: str) -> Any:
    image, _, version = name.rpartition("@" if "@" in name else ":")
    inside = {
        str(each): Component(
            name=each.name,
            version=each.version,
            type=ComponentType.LIBRARY,
            bom_ref=f"base-image:{each}",
            purl=_purl(each),
        )
        for each in contents
    }
    return Component(
        name=image or name,
        version=version,
        type=ComponentType.CONTAINER,
        bom_ref="base-image",
        hashes=_hashed(digest),
        components=inside.values(),
    )


def _purl(installed: Installed) -> PackageURL:
    type, _, space = installed.kind.partition("/")
    qualifiers = {"arch": installed.architecture} if installed.architecture else None
    return PackageURL(type, space or None, installed.name, installed.version, qualifiers)


def _hashed(sha256: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []


def _file(item: tuple[str, Mapping[str, Any]]) -> Any:
    name, entry = item
    return Component(
        name=name,
        type=ComponentType.FILE,
        bom_ref=f"file:{name}",
        hashes=_hashed(entry["sha256"]),
    )
