"""The provenance of an image names its materials, and only the holder of the key can sign it."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from canvasrt.bundle import Bundle
from canvasrt.containers.image.attest import (
    Materials,
    attest,
    attestation_of,
    check_attestation,
    read_signer,
)
from canvasrt.containers.image.base import Base, BaseLayer, read_base
from canvasrt.containers.image.blobs import Blobs, LayerEntry
from canvasrt.containers.image.oci_layout import Image, write_archive, write_layout
from canvasrt.containers.image.verify import verify_image
from canvasrt.containers.names import PACKAGE
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.requirements import Pin
from canvasrt.errors import CanvasError

CONFIG = {"architecture": "amd64", "config": {}, "rootfs": {"diff_ids": []}}
Keys = tuple[Path, Path]


def write_keys(folder: Path, name: str, private: Any = None, password: bytes | None = None) -> Keys:
    private = private or ed25519.Ed25519PrivateKey.generate()
    how = pem.BestAvailableEncryption(password) if password else pem.NoEncryption()
    key, public = folder / f"{name}.pem", folder / f"{name}.pub"
    key.write_bytes(private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, how))
    form = pem.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(private.public_key().public_bytes(pem.Encoding.PEM, form))
    return key, public


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return write_keys(tmp_path, "key")


def write(folder: Path, content: bytes) -> Image:
    folder.mkdir()
    blobs = Blobs(folder)
    layer = blobs.add_layer([LayerEntry("opt/canvasrt/x", content=content)], "t", compress=False)
    return write_layout(folder, Base(folder, CONFIG, (), ""), blobs, [layer], {}, "image:1")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return write(tmp_path / "image", b"one")


@pytest.fixture
def signed(image: Image, engines: Bundle, keys: Keys) -> Path:
    """The signed attestation of the image."""
    return sign(image, engines, keys)


def sign(image: Image, engines: Bundle, keys: Keys) -> Path:
    base = Base(image.path, CONFIG, (), "sha256:" + "b" * 64)
    pins = [Pin("numpy", "1.26.4", sha256="c" * 64)]
    options = PackageOptions(tag=image.tag, base="triton:1", max_batch=4)
    materials = Materials(base, [engines.manifest], pins, options)
    return attest(image, "oci", materials, read_signer(keys[0]))


def test_it_says_what_went_in(image: Image, signed: Path, keys: Keys, engines: Bundle) -> None:
    found = check_attestation(image.path, image.digest, keys[1])
    definition = found["buildDefinition"]
    assert definition["externalParameters"]["base"] == "triton:1"
    assert definition["externalParameters"]["targets"] == ["cpu"]
    digests = {
        each["name"]: each["digest"]["sha256"] for each in definition["resolvedDependencies"]
    }
    assert digests == {
        "triton:1": "b" * 64,
        "bundle of engines": engines.manifest.digest,
        "numpy==1.26.4": "c" * 64,
    }


def test_any_implementation_of_dsse_can_check_it(image: Image, signed: Path, keys: Keys) -> None:
    """Checks the signature as the specification describes, without any code of canvasrt."""
    envelope = json.loads(signed.read_text())
    payload = base64.b64decode(envelope["payload"])
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    said = b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload)
    public: Any = pem.load_pem_public_key(keys[1].read_bytes())
    public.verify(signature, said)
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"][0] == {
        "name": "image:1",
        "digest": {"sha256": image.digest.removeprefix("sha256:")},
    }


def test_the_same_image_gets_the_same_statement(
    image: Image, signed: Path, engines: Bundle, keys: Keys
) -> None:
    first = signed.read_text()
    assert sign(image, engines, keys).read_text() == first  # Ed25519 signatures are deterministic


def test_an_archive_of_the_image_is_the_same_image(
    image: Image, signed: Path, keys: Keys, tmp_path: Path
) -> None:
    archive = tmp_path / "archive.tar"
    write_archive(image.path, image.tag, archive)
    attestation_of(archive).write_text(signed.read_text())
    assert check_attestation(archive, read_base(archive).digest, keys[1])


def test_an_image_next_to_the_signed_one_is_refused(
    image: Image, signed: Path, keys: Keys, tmp_path: Path
) -> None:
    """A layout must contain only the signed image, since tools like skopeo choose an image by its tag. The second image
    has an unknown platform, which canvasrt's own reader skips."""
    other = write(tmp_path / "other", b"two")
    shutil.copytree(other.path / "blobs", image.path / "blobs", dirs_exist_ok=True)
    index = json.loads((image.path / "index.json").read_text())
    (more,) = json.loads((other.path / "index.json").read_text())["manifests"]
    more["platform"]["architecture"] = "unknown"
    index["manifests"].insert(0, more)
    (image.path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CanvasError, match="more than the signed image"):
        verify_image(image.path, keys[1])
    archive = tmp_path / "archive.tar"
    write_archive(image.path, image.tag, archive)  # as `canvasrt deploy` writes it
    assert read_base(archive).digest == image.image_id


@pytest.mark.parametrize("name", ["index.json", "./manifest.json", "manifest.json", "x"])
def test_an_archive_of_more_than_the_signed_image_is_refused(
    image: Image, signed: Path, keys: Keys, tmp_path: Path, name: str
) -> None:
    archive = tmp_path / "archive.tar"
    write_archive(image.path, image.tag, archive)
    attestation_of(archive).write_text(signed.read_text())
    with pytest.raises(CanvasError, match="contains no package"):  # the signature is valid
        verify_image(archive, keys[1])
    with tarfile.open(archive) as whole:
        member = whole.getmember("manifest.json")
        content = whole.extractfile(member).read()  # type: ignore[union-attr]
    member.name = name
    with tarfile.open(archive, "a") as more:
        more.addfile(member, io.BytesIO(content))
    with pytest.raises(CanvasError, match="more than the signed image"):
        verify_image(archive, keys[1])


def edited(envelope: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "payload":
        statement = base64.b64decode(envelope["payload"]).replace(b"triton:1", b"triton:2")
        return {**envelope, "payload": base64.b64encode(statement).decode()}
    if how == "signature":
        forged = {**envelope["signatures"][0], "sig": base64.b64encode(bytes(64)).decode()}
        return {**envelope, "signatures": [forged]}
    return {**envelope, **({"payloadType": "text/plain"} if how == "type" else {"signatures": []})}


@pytest.mark.parametrize("how", ["payload", "type", "signature", "none"])
def test_an_edited_attestation_is_refused(image: Image, signed: Path, keys: Keys, how: str) -> None:
    signed.write_text(json.dumps(edited(json.loads(signed.read_text()), how)))
    with pytest.raises(CanvasError, match="is not signed by"):
        check_attestation(image.path, image.digest, keys[1])


def test_what_does_not_attest_an_image_is_refused(
    image: Image, signed: Path, keys: Keys, tmp_path: Path
) -> None:
    _, other_key = write_keys(tmp_path, "other")
    with pytest.raises(CanvasError, match="is not signed by"):
        check_attestation(image.path, image.digest, other_key)
    other = write(tmp_path / "another", b"two")
    with pytest.raises(CanvasError, match="is not signed"):
        check_attestation(other.path, other.digest, keys[1])
    attestation_of(other.path).write_text(signed.read_text())
    with pytest.raises(CanvasError, match="is about another image"):
        check_attestation(other.path, other.digest, keys[1])
    for text, said in (("{", "is not signed by"), ("", "is about another image")):
        signed.write_text(text)
        with pytest.raises(CanvasError, match=said):
            check_attestation(image.path, image.digest, keys[1])


def test_other_kinds_of_key_and_a_password(
    image: Image, engines: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = write_keys(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()), b"secret")
    with pytest.raises(CanvasError, match="cannot sign with"):
        sign(image, engines, keys)
    monkeypatch.setenv("CANVASRT_SIGNING_PASSWORD", "secret")
    sign(image, engines, keys)
    assert check_attestation(image.path, image.digest, keys[1])


def test_keys_that_are_none_are_refused(image: Image, signed: Path, tmp_path: Path) -> None:
    (bad := tmp_path / "bad.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    for path in (bad, tmp_path / "none.pem"):
        with pytest.raises(CanvasError, match="cannot sign with"):
            read_signer(path)
        with pytest.raises(CanvasError, match="is not a public key"):
            check_attestation(image.path, image.digest, path)


def test_the_signature_is_checked_before_any_layer_is_read(
    image: Image, signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other = write_keys(tmp_path, "other")
    archive = tmp_path / "image.tar"
    write_archive(image.path, "image:1", archive)
    attestation_of(archive).write_bytes(signed.read_bytes())

    def read(layer: BaseLayer) -> None:
        raise AssertionError("a layer was read")

    monkeypatch.setattr(BaseLayer, "opened", read)
    for path in (image.path, archive):
        with pytest.raises(CanvasError, match="not signed by"):
            verify_image(path, other)


def test_documents_of_an_image_are_small(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    blobs = Blobs(folder)
    large = LayerEntry(f"{PACKAGE.lstrip('/')}/manifest.json", content=b" " * (5 << 20))
    layer = blobs.add_layer([large], "t", compress=True)
    image = write_layout(folder, Base(folder, CONFIG, (), ""), blobs, [layer], {}, "image:1")
    with pytest.raises(CanvasError, match="5242880 bytes; the limit is 4194304"):
        verify_image(image.path)
