"""Untrusted files: base images, archives, manifests and checkpoints, whose names and sizes may be hostile."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import MANIFEST, Bundle
from canvasrt.containers.image.base import Base, signed_digest
from canvasrt.containers.image.blobs import Blobs, LayerEntry
from canvasrt.containers.image.oci_layout import write_layout
from canvasrt.containers.image.verify import verify_image
from canvasrt.containers.names import PACKAGE, SBOM
from canvasrt.errors import CanvasError
from canvasrt.hashes import canonical


def canvasrt(*arguments: Any) -> tuple[int, str]:
    """Run a command; return its exit code, and its errors joined to one line."""
    command = [sys.executable, "-m", "canvasrt", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, " ".join(done.stderr.split())


def files_of(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_a_layer_s_digest_does_not_lead_out_of_the_image(engines: Bundle, tmp_path: Path):
    base = tmp_path / "a" / "base"
    blobs = base / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: Any) -> dict[str, Any]:
        text = json.dumps(content).encode()
        digest = hashlib.sha256(text).hexdigest()
        (blobs / digest).write_bytes(text)
        return {"digest": f"sha256:{digest}", "size": len(text)}

    escaped = "sha256:../../../escaped"
    (tmp_path / "a" / "escaped").write_bytes(b"x" * 10)
    config = {"architecture": "amd64", "rootfs": {"diff_ids": ["sha256:" + "0" * 64]}}
    layer = {"digest": escaped, "size": 10}
    manifest = blob({"config": blob(config), "layers": [layer]})
    (base / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    (tmp_path / "b").mkdir()
    before = files_of(tmp_path)
    out = tmp_path / "b" / "image"
    code, errors = canvasrt(
        *("package", engines.path, "--format", "oci", "--base", base, "--tag", "a:1", "-o", out)
    )
    assert (code, escaped in errors, "not a SHA-256 digest" in errors) == (1, True, True)
    assert files_of(tmp_path) == before


def test_a_checkpoint_s_index_does_not_lead_out_of_its_folder(
    checkpoint_files: Path, tmp_path: Path
):
    (checkpoint_files.parent / "b").mkdir()
    shutil.copy(checkpoint_files / "model.safetensors", tmp_path / "outside.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "../outside.safetensors"}}
    (checkpoint_files / "model.safetensors.index.json").write_text(json.dumps(index))
    before = files_of(tmp_path)
    out = tmp_path / "graphs"
    code, errors = canvasrt("export", checkpoint_files, "-o", out)
    assert (code, "'../outside.safetensors'" in errors) == (1, True)
    assert "outside the checkpoint's folder" in errors
    assert files_of(tmp_path) == before


def test_an_unsigned_archive_is_read_within_limits(tmp_path: Path):
    """The archives have a member name of 400 MB (sparse, 8 KB on disk), a document of a million brackets, and a
    document of 400 MB."""
    long, deep, large = tmp_path / "long.tar", tmp_path / "deep", tmp_path / "large"
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 400 << 20
    with long.open("wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + header.size + 1024)
    deep.mkdir()
    (deep / "index.json").write_text("[" * 1_000_000)
    large.mkdir()
    with (large / "index.json").open("wb") as file:
        file.truncate(400 << 20)
    tracemalloc.start()
    for path in (long, deep, large):
        with pytest.raises(CanvasError, match="is damaged"):
            signed_digest(path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("place", "name", "text"),
    [
        ("target", "builder_version", "1.7\n--index-url http://localhost:9\nevil==1"),
        ("target", "name", "../../cpu"),
        ("made_by", "canvasrt", "0.1 # \\"),
        ("options", "precision", 'fp32"\nRUN touch /owned'),
    ],
)
def test_a_manifest_s_strings_are_no_commands(
    engines: Bundle, tmp_path: Path, place: str, name: str, text: str
):
    """Strings of a manifest are written to the requirements and the Dockerfile of a package, so they are checked."""
    copy = tmp_path / "foreign"
    shutil.copytree(engines.path, copy)
    (copy / MANIFEST).write_bytes(edited(engines, place, name, text))
    code, errors = canvasrt("package", copy, "-o", tmp_path / "package")
    assert (code, "/manifest.json" in errors) == (1, True)
    assert not (tmp_path / "package").exists()


def edited(bundle: Bundle, place: str, name: str, value: Any) -> bytes:
    """Return a bundle's manifest with a changed value and a matching digest."""
    data = json.loads((bundle.path / MANIFEST).read_text())
    data[place][name] = value
    del data["digest"]
    data["digest"] = hashlib.sha256(canonical(data).encode()).hexdigest()
    return canonical(data).encode()


@pytest.mark.parametrize(
    ("place", "name", "value", "refusal"),
    [
        ("target", "name", "cpu\nRUN touch /owned", "not a name or a version"),
        ("made_from", "source", "a\x1b[2J", "control characters"),
        ("files", "../../outside", {"sha256": "0" * 64, "bytes": 1}, "outside the bundle"),
        ("files", "a", ["sha256"], "is damaged"),
        ("model", "layers", 3, "is damaged"),
        ("model", "unknown", 3, "another version"),
    ],
)
def test_an_image_s_manifest_is_checked_as_a_bundle_s(
    engines: Bundle, tmp_path: Path, place: str, name: str, value: Any, refusal: str
):
    manifest = edited(engines, place, name, value)
    with pytest.raises(CanvasError, match=refusal):
        verify_image(image_of(tmp_path, manifest, b"{}"))


@pytest.mark.parametrize("deep", [MANIFEST, SBOM])
def test_documents_of_a_million_brackets(engines: Bundle, tmp_path: Path, deep: str):
    files = {MANIFEST: (engines.path / MANIFEST).read_bytes(), deep: b"[" * 1_000_000}
    with pytest.raises(CanvasError, match="is damaged"):
        verify_image(image_of(tmp_path, files[MANIFEST], files.get(SBOM, b"{}"), engines))


def image_of(folder: Path, manifest: bytes, bom: bytes, engines: Bundle | None = None) -> Path:
    """Write an image with this manifest, this bill of materials, and files of engines."""
    out = folder / "image"
    out.mkdir()
    blobs, inside = Blobs(out), PACKAGE.lstrip("/")
    entries = [
        LayerEntry(f"{inside}/{MANIFEST}", content=manifest),
        LayerEntry(f"{inside}/{SBOM}", content=bom),
    ]
    for name in engines.manifest.files if engines else ():
        entries.append(LayerEntry(f"{inside}/{name}", engines.path / name))
    layer = blobs.add_layer(entries, "t", compress=True)
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"diff_ids": []}}
    write_layout(out, Base(out, config, (), ""), blobs, [layer], {}, "image:1")
    return out
