"""Bundles: the content of the manifest, and the detection of every change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import canvasrt
from canvasrt.bundle import MANIFEST, Bundle, _digest, load_bundle
from canvasrt.errors import CanvasError
from canvasrt.hashes import canonical
from tests.helpers.bundles import MODEL, SAMPLER, make


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b")
    manifest = bundle.manifest
    assert manifest.kind == "graphs"
    assert manifest.model == MODEL
    assert manifest.sampler == SAMPLER
    assert manifest.segments[0]["layers"] == [0, 1]
    assert set(manifest.files) == {
        "body_0.onnx",
        "embedding.bin",
        "empty",
        "tokenizer/tokenizer.json",
    }
    assert set(manifest.made_by) == {"canvasrt", "numpy"}
    assert bundle.file("embedding.bin").stat().st_size == 2048
    assert manifest.total_bytes == 2048 + 500 + 2
    assert bundle.unlisted() == []


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    assert (first.path / MANIFEST).read_bytes() == (second.path / MANIFEST).read_bytes()
    assert str(tmp_path) not in (first.path / MANIFEST).read_text()


def test_one_flipped_bit_in_any_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b")
    file = bundle.path / MANIFEST
    good = file.read_bytes()
    for position in range(len(good)):
        file.write_bytes(
            good[:position] + bytes([good[position] ^ (1 << position % 8)]) + good[position + 1 :]
        )
        with pytest.raises(CanvasError, match=r"manifest\.json"):
            load_bundle(bundle.path, check=False)
    file.write_bytes(good)
    load_bundle(bundle.path)


def test_one_flipped_bit_in_a_file_is_found_and_the_file_named(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b")
    for name in ("body_0.onnx", "tokenizer/tokenizer.json"):
        file = bundle.path / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CanvasError, match=name):
            load_bundle(bundle.path)
        file.write_bytes(content)


def test_a_missing_longer_or_shorter_file_is_found_without_hashing(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b")
    file = bundle.file("empty")
    file.write_bytes(b"x")
    with pytest.raises(CanvasError, match="empty has 1 bytes; the manifest says 0"):
        load_bundle(bundle.path, check=False)
    file.unlink()
    with pytest.raises(CanvasError, match="empty is missing"):
        load_bundle(bundle.path, check=False)


def test_whitespace_and_trailing_bytes_in_the_manifest_are_found(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b")
    file = bundle.path / MANIFEST
    good = file.read_text()
    for text in (good + "\n", good.rstrip(), json.dumps(json.loads(good)), "", "[]", good * 2):
        file.write_text(text)
        with pytest.raises(CanvasError, match=r"manifest\.json"):
            load_bundle(bundle.path, check=False)


def edited(bundle: Bundle, edit: Callable[[Any], Any]) -> Path:
    """Change a bundle's manifest with `edit`, and correct its digest. Return the bundle's folder."""
    data = json.loads((bundle.path / MANIFEST).read_text())
    edit(data)
    data["digest"] = _digest(data)
    (bundle.path / MANIFEST).write_text(canonical(data))
    return bundle.path


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda data: data.update(schema=99, files=7), "has schema 99, not 1"),
        (lambda data: data.pop("embedding"), "has no field 'embedding'"),
        (lambda data: data.update(profiles=[]), "has a field 'profiles'"),
        (lambda data: data["model"].pop("hidden_size"), "has no field 'hidden_size'"),
        (lambda data: data["model"].pop("layers"), "has no field 'layers'"),
        (lambda data: data["model"].update(heads=3), "has a field 'heads'"),
        (lambda data: data["model"]["layers"][0].pop("kind"), "has no field 'kind'"),
        (lambda data: data["sampler"].update(speed=3), "has a field 'speed'"),
        (
            lambda data: (data["made_by"].update(canvasrt="0.0.9"), data.pop("embedding")),
            "has no field 'embedding': canvasrt 0.0.9 wrote it",
        ),
        (lambda data: data.update(schema=0, made_by=7), "another version of canvasrt wrote it"),
        (lambda data: data.update(schema=0), "has schema 0, not 1"),
        (lambda data: data.pop("schema"), "has schema None, not 1"),
    ],
)
def test_another_version_s_manifest_says_to_build_again(
    tmp_path: Path, edit: Callable[[Any], Any], says: str
) -> None:
    path = edited(make(tmp_path / "b"), edit)
    with pytest.raises(CanvasError, match=re.escape(says)) as raised:
        load_bundle(path)
    assert str(path / MANIFEST) in raised.value.message
    assert f"wrote it; this is canvasrt {canvasrt.__version__}" in raised.value.message
    assert "canvasrt build" in raised.value.hint


def test_a_manifest_cannot_name_files_outside_of_its_bundle(tmp_path: Path) -> None:
    path = edited(make(tmp_path / "b"), lambda data: data["files"].update({"../secret": 0}))
    with pytest.raises(CanvasError, match="outside"):
        load_bundle(path)


def test_a_field_that_a_later_stage_misses_says_so_too(tmp_path: Path) -> None:
    path = edited(make(tmp_path / "b"), lambda data: data["segments"][0].pop("layers"))
    segment = load_bundle(path).manifest.segments[0]
    with pytest.raises(CanvasError, match=r"manifest.json has no field 'layers'") as raised:
        segment["layers"]
    assert "canvasrt build" in raised.value.hint


def test_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "b")
    load_bundle(tmp_path / "b", kind=("graphs", "engines"))
    with pytest.raises(
        CanvasError, match="is a bundle of graphs, but engines are needed here"
    ) as raised:
        load_bundle(tmp_path / "b", kind="engines")
    assert "canvasrt build" in raised.value.hint


def test_a_package_is_refused_with_its_engines_named(tmp_path: Path) -> None:
    inside = make(tmp_path / "p" / "engines" / "cpu").path
    for each in make(tmp_path / "made", kind="package").path.iterdir():
        each.rename(tmp_path / "p" / each.name)
    with pytest.raises(CanvasError, match="but graphs or engines are needed here") as raised:
        load_bundle(tmp_path / "p", kind=("graphs", "engines"))
    assert str(inside) in raised.value.hint


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(CanvasError, match="no bundle at"):
        load_bundle(tmp_path / "nothing")
    with pytest.raises(CanvasError, match=r"is not a bundle: it has no manifest\.json"):
        load_bundle(tmp_path)
    make(tmp_path / "cpu")
    with pytest.raises(CanvasError) as raised:
        load_bundle(tmp_path)
    assert raised.value.hint == f"name one of its bundles: {tmp_path / 'cpu'}"


def test_unlisted_files_are_reported(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b")
    (bundle.path / "notes.txt").write_text("mine")
    assert load_bundle(bundle.path).unlisted() == ["notes.txt"]
