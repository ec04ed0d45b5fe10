"""A base image is untrusted, so names in its files are checked before use."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import signal
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from canvasrt.containers.image.base import Base, read_base
from canvasrt.containers.image.blobs import Blobs, LayerEntry
from canvasrt.containers.image.build import options_for
from canvasrt.containers.image.oci_layout import write_archive, write_layout
from canvasrt.containers.image.verify import verify_image
from canvasrt.containers.package.options import PackageOptions
from canvasrt.errors import CanvasError

CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "config": {"Env": ["A=1"]},
    "rootfs": {"type": "layers", "diff_ids": []},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An image with two layers, as an OCI layout."""
    folder = tmp_path / "base"
    folder.mkdir()
    blobs = Blobs(folder)
    layers = [
        blobs.add_layer([LayerEntry(f"usr/{n}", content=bytes([n]) * 2000)], "t", compress=n > 0)
        for n in range(2)
    ]
    write_layout(folder, Base(folder, CONFIG, (), ""), blobs, layers, {}, "base:1")
    return folder


@contextmanager
def seconds(limit: int) -> Iterator[None]:
    """Fail if the `with` block takes longer than this many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def manifest_of(layout: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    index = json.loads((layout / "index.json").read_text())
    digest = index["manifests"][0]["digest"].removeprefix("sha256:")
    return index, json.loads((layout / "blobs" / "sha256" / digest).read_text())


def edit(layout: Path, change: Any) -> None:
    """Change the manifest, and update the index to match."""
    index, manifest = manifest_of(layout)
    change(manifest, index)
    content = json.dumps(manifest).encode()
    digest = hashlib.sha256(content).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(content)
    index["manifests"][0]["digest"] = f"sha256:{digest}"
    index["manifests"][0]["size"] = len(content)
    (layout / "index.json").write_text(json.dumps(index))


def copy(base: Path, out: Path) -> list[dict[str, Any]]:
    out.mkdir()
    return read_base(base).copy_into(Blobs(out))


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../escaped",
        "sha256:/tmp/escaped",
        "../escaped",
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 64 + "\n",
        "sha512:" + "a" * 128,
        "",
        7,
    ],
)
@pytest.mark.parametrize("which", ["layers", "config"])
def test_a_digest_that_is_none_is_refused_by_name(base: Path, tmp_path: Path, which, digest):
    def change(manifest: dict[str, Any], _: Any) -> None:
        entry = manifest["config"] if which == "config" else manifest["layers"][0]
        entry["digest"] = digest
        if which == "layers":
            entry["size"] = 10

    edit(base, change)
    with pytest.raises(CanvasError, match="not a SHA-256 digest") as refused:
        copy(base, tmp_path / "out")
    assert repr(digest)[1:20] in str(refused.value)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_blobs_are_only_ever_written_by_a_digest(tmp_path: Path):
    with pytest.raises(CanvasError, match="not a SHA-256 digest"):
        Blobs(tmp_path / "out").path("sha256:../../x")


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_was_changed_is_refused(base: Path, tmp_path: Path, layer: int):
    digest = manifest_of(base)[1]["layers"][layer]["digest"]
    blob = Blobs(base).path(digest)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with pytest.raises(CanvasError, match=f"{digest} does not match"):
        copy(base, tmp_path / "out")
    blob.unlink()
    blob.mkdir()
    with pytest.raises(CanvasError, match="is damaged"):
        copy(base, tmp_path / "again")


@pytest.mark.parametrize("size", [-1, True, "12", None])
def test_a_size_that_is_none_is_refused(base: Path, tmp_path: Path, size: Any):
    edit(base, lambda manifest, _: manifest["layers"][0].update(size=size))
    with pytest.raises(CanvasError, match="is damaged"):
        copy(base, tmp_path / "out")


def test_a_manifest_of_gigabytes_is_not_read(base: Path):
    digest = manifest_of(base)[1]["config"]["digest"]
    with Blobs(base).path(digest).open("wb") as file:
        file.truncate(1 << 33)
    with seconds(5), pytest.raises(CanvasError, match=r"8589934592 bytes.*at most"):
        read_base(base)


def archive(base: Path, out: Path, change: Any = lambda members: members) -> Path:
    """Write an archive as `docker save` does, after `change` has changed its members."""
    write_archive(base, "base:1", out)
    with tarfile.open(out) as opened:
        members = {
            each.name: (each, (opened.extractfile(each) or io.BytesIO()).read()) for each in opened
        }
    with tarfile.open(out, "w") as changed:
        for info, content in change(members).values():
            info.size = 0 if info.issym() or info.islnk() else len(content)
            changed.addfile(info, io.BytesIO(content))
    return out


def layers_of(members: dict[str, Any]) -> list[str]:
    return json.loads(members["manifest.json"][1])[0]["Layers"]


def link(name: str, target: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def test_an_archive_is_read_as_it_was_written(base: Path, tmp_path: Path):
    file = archive(base, tmp_path / "base.tar")
    with_link = archive(base, tmp_path / "linked.tar", as_old_versions_link)
    digests = [each["digest"] for each in manifest_of(base)[1]["layers"]]
    for each in (file, with_link):
        described = copy(each, tmp_path / f"out-{each.name}")
        assert [entry["digest"] for entry in described] == digests


def as_old_versions_link(members: dict[str, Any]) -> dict[str, Any]:
    """Move a layer and leave a link in its place, as old versions of docker do."""
    name = layers_of(members)[0]
    info, content = members.pop(name)
    info.name = "layers/kept.tar"
    return {"kept": (info, content), name: link(name, "../../layers/kept.tar", tarfile.SYMTYPE)} | (
        members
    )


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("length", [1, 2])
def test_an_archive_whose_links_form_a_cycle_is_refused(
    base: Path, tmp_path: Path, kind: bytes, length: int
):
    def circle(members: dict[str, Any]) -> dict[str, Any]:
        name = layers_of(members)[0]
        if length == 1:
            target = name if kind == tarfile.LNKTYPE else Path(name).name
            return {**members, name: link(name, target, kind)}
        back = name if kind == tarfile.LNKTYPE else f"../{name}"
        there = "other/x" if kind == tarfile.LNKTYPE else "../../other/x"
        return {
            **members,
            name: link(name, there, kind),
            "other/x": link("other/x", back, kind),
        }

    file = archive(base, tmp_path / "base.tar", circle)
    with seconds(10), pytest.raises(CanvasError, match="form a cycle"):
        read_base(file)


def linked_out(target: str) -> Any:
    def change(members: dict[str, Any]) -> dict[str, Any]:
        name = layers_of(members)[0]
        return {**members, name: link(name, target, tarfile.SYMTYPE)}

    return change


def swapped(pack: Any) -> Any:
    def change(members: dict[str, Any]) -> dict[str, Any]:
        name = layers_of(members)[0]
        other = io.BytesIO()
        with tarfile.open(fileobj=other, mode="w") as inner:
            inner.addfile(tarfile.TarInfo("evil"))
        return {**members, name: (members[name][0], pack(other.getvalue()))}

    return change


def damaged(members: dict[str, Any]) -> dict[str, Any]:
    info, content = members[name := layers_of(members)[1]]
    return {**members, name: (info, content[:12] + b"\xff" * 8 + content[20:])}


def dropped(members: dict[str, Any]) -> dict[str, Any]:
    info, content = members["manifest.json"]
    listed = json.loads(content)
    listed[0]["Layers"].pop()
    return {**members, "manifest.json": (info, json.dumps(listed).encode())}


def configured_otherwise(members: dict[str, Any]) -> dict[str, Any]:
    name = json.loads(members["manifest.json"][1])[0]["Config"]
    info, content = members[name]
    return {**members, name: (info, content.replace(b"A=1", b"A=2"))}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (linked_out(each), "is damaged")
            for each in ("../../../../etc/passwd", "/etc/passwd", "..")
        ),
        *((swapped(each), "does not match") for each in (bytes, gzip.compress)),
        (damaged, "is damaged"),
        (dropped, "1 layers but 2 digests"),
        (configured_otherwise, "does not match"),
    ],
)
def test_an_archive_that_is_not_as_its_configuration_says_is_refused(
    base: Path, tmp_path: Path, change: Any, said: str
):
    with pytest.raises(CanvasError, match=said):
        read_base(archive(base, tmp_path / "base.tar", change))


def test_a_damaged_gzip_stream_is_named(base: Path):
    digest = manifest_of(base)[1]["layers"][1]["digest"]
    blob = Blobs(base).path(digest)
    blob.write_bytes(blob.read_bytes()[:12] + b"\xff" * 8 + blob.read_bytes()[20:])
    with pytest.raises(CanvasError, match=f"{digest} does not match its content"):
        verify_image(base)


STATUS = """Package: libssl3
Status: install ok installed
Architecture: amd64
Version: 3.0.2-1

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def test_the_packages_of_a_base_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from canvasrt.containers.image.contents import contents

    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "debian"
    folder.mkdir()
    blobs = Blobs(folder)
    python = "usr/lib/python3/dist-packages"
    below = [
        LayerEntry("var/lib/dpkg/status", content=STATUS.replace("3.0.2-1", "old").encode()),
        LayerEntry("usr/lib/os-release", content=b'NAME="x"\nID=ubuntu\n'),
        LayerEntry(f"{python}/pip-24.0.dist-info/METADATA", content=b"Name: pip"),
        LayerEntry(f"{python}/numpy-1.26.4.dist-info/METADATA", content=b"Name: numpy"),
        LayerEntry("opt/site-packages/old-1.dist-info/METADATA", content=b"Name: old"),
        LayerEntry("opt/site-packages/kept-1.dist-info/METADATA", content=b"Name: kept"),
    ]
    above = [
        LayerEntry("var/lib/dpkg/status", content=STATUS.encode()),
        LayerEntry(f"{python}/.wh.pip-24.0.dist-info", content=b""),
        # This entry hides the folder of the lower layer.
        LayerEntry("opt/site-packages/.wh..wh..opq", content=b""),
        LayerEntry("opt/site-packages/kept-1.dist-info/METADATA", content=b"Name: kept"),
    ]
    layers = [blobs.add_layer(each, "t", compress=True) for each in (below, above)]
    write_layout(folder, Base(folder, CONFIG, (), ""), blobs, layers, {}, "base:1")
    base = read_base(folder)
    intact = (top := base.layers[-1].file).read_bytes()
    for position in (20, len(intact) - 1):  # in the compressed data, and in its trailer
        top.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        with pytest.raises(CanvasError, match=r"sha256:\w+ does not match its content"):
            contents(base)
    top.write_bytes(intact)
    found = contents(base)
    assert [str(each) for each in found] == [
        "deb/ubuntu:libssl3@3.0.2-1:amd64",
        "pypi:kept@1:",
        "pypi:numpy@1.26.4:",
    ]
    for layer in base.layers:
        layer.file.unlink()
    assert contents(base) == found  # from memory


@pytest.mark.parametrize("names", [(), ("nvcr.io/nvidia/tritonserver:26.07-py3",)])
def test_a_package_knows_the_digest_of_a_base_on_disk(names: tuple[str, ...]) -> None:
    environment = ["NVIDIA_TRITON_SERVER_VERSION=26.07"]
    config = {"architecture": "amd64", "config": {"Env": environment}}
    base = Base(Path("triton"), config, (), "sha256:" + "b" * 64, names)
    assert options_for(base, PackageOptions()).base_digest == "b" * 64
