"""Written images are reproducible and complete. An image that could not work is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.image.base import Base, read_base
from canvasrt.containers.image.blobs import Blobs, LayerEntry, entries_of
from canvasrt.containers.image.oci_layout import Image, check_tag, write_archive, write_layout
from canvasrt.containers.image.verify import verify_image
from canvasrt.containers.package.image_settings import created
from canvasrt.errors import CanvasError, UsageError
from tests.conftest import Command

TAG = "canvasrt-test:1"


def base_config(architecture: str = "amd64", **variables: str) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": [f"{name}={value}" for name, value in variables.items()]},
        "rootfs": {"type": "layers", "diff_ids": []},
    }


def write_base(folder: Path, **config: str) -> Path:
    """Write a base image that contains only a link in place of Python."""
    folder.mkdir()
    blobs = Blobs(folder)
    entries = [LayerEntry("usr/bin/python3", link="python3.12")]
    layer = blobs.add_layer(entries, "test", compress=True, above="usr")
    nothing = Base(folder, base_config(**config), (), "")
    write_layout(folder, nothing, blobs, [layer], {}, "base:1")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def write(out: Path, base: Path, packaged: Bundle) -> Image:
    """Write an image with a package's files on a base, without Python packages."""
    out.mkdir()
    blobs = Blobs(out)
    entries = [
        *entries_of(packaged.path / "engines", "opt/canvasrt/package/engines"),
        *entries_of(packaged.path / "models", "opt/canvasrt/package/models"),
        LayerEntry("opt/canvasrt/package/sbom.cdx.json", packaged.path / "sbom.cdx.json"),
        LayerEntry("opt/canvasrt/package/manifest.json", packaged.path / "image" / "manifest.json"),
    ]
    random.shuffle(entries)
    layer = blobs.add_layer(entries, "test", compress=False)
    return write_layout(out, read_base(base), blobs, [layer], {"User": "1000:1000"}, TAG)


def test_two_runs_give_one_digest(base: Path, packaged: Bundle, tmp_path: Path):
    first = write(tmp_path / "first", base, packaged)
    for file in packaged.path.rglob("models/**/*"):
        os.utime(file, (1, 1))
    os.umask(before := os.umask(0o077))
    second = write(tmp_path / "second", base, packaged)
    os.umask(before)
    assert first.digest == second.digest
    assert first.image_id == second.image_id
    archives = []
    for image in (first, second):
        write_archive(image.path, TAG, archive := image.path.with_suffix(".tar"))
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]


def test_an_archive_says_what_the_layout_says(base: Path, packaged: Bundle, tmp_path: Path):
    image = write(tmp_path / "layout", base, packaged)
    write_archive(image.path, TAG, tmp_path / "archive.tar")
    layout, archive = read_base(image.path), read_base(tmp_path / "archive.tar")
    assert archive.config == layout.config
    assert [layer.digest for layer in archive.layers] == [layer.digest for layer in layout.layers]
    assert archive.names == layout.names == (TAG,)
    assert archive.python == layout.python == ("/usr/bin/python3", "3.12")


def test_layers_hold_nothing_of_this_machine(base: Path, packaged: Bundle, tmp_path: Path):
    image = write(tmp_path / "layout", base, packaged)
    (layer,) = image.layers
    with tarfile.open(Blobs(image.path).path(layer.digest)) as archive:
        members = archive.getmembers()
    assert {member.mtime for member in members} == {0}
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}
    assert {member.mode for member in members} == {0o644, 0o755}
    assert all(member.name.startswith("opt/canvasrt") for member in members)
    assert [member.name for member in members] == sorted(member.name for member in members)


def test_an_image_is_verified(base: Path, packaged: Bundle, tmp_path: Path, command: Command):
    image = write(tmp_path / "layout", base, packaged)
    write_archive(image.path, TAG, tmp_path / "archive.tar")
    for path in (image.path, tmp_path / "archive.tar"):
        done = command("verify", path, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["files"] == len(
            json.loads((packaged.path / "image" / "manifest.json").read_text())["files"]
        )


def test_a_flipped_byte_or_another_file_in_an_image_is_found(
    base: Path, packaged: Bundle, tmp_path: Path
):
    image = write(tmp_path / "layout", base, packaged)
    for digest in (image.layers[0].digest, image.image_id):
        blob = Blobs(image.path).path(digest)
        content = blob.read_bytes()
        middle = len(content) // 2
        blob.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(CanvasError, match=digest):
            verify_image(image.path)
        blob.write_bytes(content)
    changed = tmp_path / "changed"
    shutil.copytree(packaged.path, changed)
    (changed / "models" / "canvasrt" / "config.pbtxt").write_text("else")
    write(tmp_path / "other", base, Bundle(changed, packaged.manifest))
    with pytest.raises(CanvasError, match=r"models/canvasrt/config\.pbtxt.* differs"):
        verify_image(tmp_path / "other")


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("canvasrt", "canvasrt:latest"),
        ("me/canvasrt:1.0", "me/canvasrt:1.0"),
        ("registry:5000/canvasrt", "registry:5000/canvasrt:latest"),
    ],
)
def test_names_of_images(given: str, full: str):
    assert check_tag(given) == full


@pytest.mark.parametrize("given", ["", "Canvasrt", "a b", "canvasrt:", "a//b", "canvasrt:ü x"])
def test_names_that_no_image_can_have(given: str):
    with pytest.raises(UsageError, match="not a name for an image"):
        check_tag(given)


def test_a_time_of_creation_is_a_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "")
    assert created() == "1970-01-01T00:00:00Z"
    for text in ("now", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
        with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH is"):
            created()


def test_a_base_that_cannot_be_used_is_refused(base: Path, tmp_path: Path):
    with pytest.raises(
        CanvasError, match="is neither an OCI layout nor a docker archive"
    ) as refused:
        read_base(tmp_path / "nowhere")
    assert "skopeo copy" in refused.value.hint
    with pytest.raises(CanvasError, match="is for amd64, but the engines need arm64"):
        read_base(base, "arm64")
    arm = write_base(tmp_path / "arm", architecture="arm64")
    assert read_base(arm, "arm64").architecture == "arm64"
    (base / "index.json").write_text("{}")
    with pytest.raises(CanvasError, match="is damaged"):
        read_base(base)
