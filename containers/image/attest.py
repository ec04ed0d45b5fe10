"""Signed provenance of an image: an in-toto statement (SLSA provenance v1) in a DSSE envelope."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import canvasrt
from canvasrt.bundle import Manifest
from canvasrt.containers.image.base import Base
from canvasrt.containers.image.oci_layout import Image
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.requirements import Pin
from canvasrt.errors import CanvasError
from canvasrt.extras import require

ATTESTATION_SUFFIX = ".intoto.jsonl"
PASSWORD = "CANVASRT_SIGNING_PASSWORD"
PAYLOAD = "application/vnd.in-toto+json"
PROVENANCE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "urn:canvasrt:package:v1"
_BUILDER = "urn:canvasrt:local"
_MAKE_ONE = (
    "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"
)


@dataclass(frozen=True)
class Materials:
    """The materials of an image: its base, engines and wheels."""

    base: Base
    bundles: Sequence[Manifest]
    pins: Sequence[Pin]
    options: PackageOptions


def attestation_of(image: Path) -> Path:
    """Return the path of an image's attestation file, which is next to the image."""
    return image.with_name(image.name + ATTESTATION_SUFFIX)


def read_signer(key: Path) -> Any:
    """Return the signer for a private key in PEM. Raises CanvasError if the key cannot be used.

    The variable CANVASRT_SIGNING_PASSWORD contains the key's password, if it has one.
    """
    require("securesystemslib", "serve")
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    password = os.environ.get(PASSWORD)
    try:
        return CryptoSigner(
            load_pem_private_key(key.read_bytes(), password.encode() if password else None)  # type: ignore[arg-type]
        )
    except (OSError, ValueError, TypeError) as error:
        raise CanvasError(
            f"cannot sign with {key}: {error}",
            f"give a private key in PEM (Ed25519, ECDSA or RSA; {PASSWORD} decrypts it): {_MAKE_ONE}",
        ) from error


def attest(image: Image, format: str, materials: Materials, signer: Any) -> Path:
    """Write an image's signed provenance to a file next to the image; return the file."""
    from securesystemslib.dsse import Envelope

    statement = _statement(image, format, materials)
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
    envelope = Envelope(payload, PAYLOAD, {})
    envelope.sign(signer)
    out = attestation_of(image.path)
    out.write_text(json.dumps(envelope.to_dict(), sort_keys=True) + "\n", encoding="utf-8")
    return out


def check_attestation(image: Path, digest: str, key: Path) -> Mapping[str, Any]:
    """Return an image's provenance. Raises CanvasError if it is not signed by `key` or does not name `digest`."""
    require("securesystemslib", "serve")
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import Error

    public = _public(key)
    file = attestation_of(image)
    if not file.is_file():
        raise CanvasError(
            f"{image} is not signed: {file} does not exist",
            "sign images with `canvasrt package --sign KEY`, and copy the attestation with the image",
        )
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            envelope = Envelope.from_dict(json.loads(line))
            envelope.verify([public], 1)
            statement = json.loads(envelope.payload)
            digests = [each["digest"].get("sha256") for each in statement["subject"]]
            if (
                envelope.payload_type == PAYLOAD
                and statement["predicateType"] == PROVENANCE
                and digest.removeprefix("sha256:") in digests
            ):
                return statement["predicate"]
    except (Error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CanvasError(
            f"{file} is not signed by {key}: {error}",
            "get the image and its attestation again, or check which key should have signed it",
        ) from error
    raise CanvasError(
        f"{file} is about another image: it does not name {digest}",
        "get the attestation that was written with this image",
    )


def _public(key: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        return SSlibKey.from_crypto(load_pem_public_key(key.read_bytes()))  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise CanvasError(
            f"--key {key} is not a public key: {error}", f"give one in PEM: {_MAKE_ONE}"
        ) from error


def _statement(image: Image, format: str, materials: Materials) -> dict[str, Any]:
    """Return the statement about an image.

    It contains no timestamp, so equal images get equal statements. Its subjects are the manifest and the configuration.
    The configuration's digest is docker's id of the image.
    """
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement

    options = materials.options
    given = {
        "format": format,
        "tag": options.tag,
        "base": options.base,
        "engines": options.engines,
        "maxBatch": options.max_batch or 0,
        "targets": [(each.target or {}).get("name", "graphs") for each in materials.bundles],
    }
    base = {
        "name": options.base,
        "uri": f"oci:{options.base}",
        "digest": {"sha256": materials.base.digest.removeprefix("sha256:")},
    }
    bundles = [
        {"name": f"bundle of {each.kind}", "digest": {"sha256": each.digest}}
        for each in materials.bundles
    ]
    wheels = [
        {
            "name": str(pin),
            "uri": f"pkg:pypi/{pin.name}@{pin.version}",
            "digest": {"sha256": pin.sha256},
        }
        for pin in materials.pins
    ]
    predicate = {
        "buildDefinition": {
            "buildType": _BUILD_TYPE,
            "externalParameters": given,
            "internalParameters": {"python": options.python, "tensorrt": options.tensorrt or ""},
            "resolvedDependencies": [base, *bundles, *wheels],
        },
        "runDetails": {"builder": {"id": _BUILDER, "version": {"canvasrt": canvasrt.__version__}}},
    }
    json_format.ParseDict(predicate, Provenance())  # raises for fields outside the schema
    subjects = [
        ResourceDescriptor(name=name, digest={"sha256": digest.removeprefix("sha256:")}).pb
        for name, digest in (
            (image.tag, image.digest),
            (f"{image.tag} (configuration)", image.image_id),
        )
    ]
    statement = Statement(subjects, PROVENANCE, predicate)
    statement.validate()
    return json_format.MessageToDict(statement.pb)
