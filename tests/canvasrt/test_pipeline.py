"""Building CPU engines from a real checkpoint: reuse, plans, and errors before a build."""

from __future__ import annotations

import inspect
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from canvasrt.build.options import BuildOptions
from canvasrt.build.source import find_source, hash_source
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.errors import CanvasError
from canvasrt.pipeline import build_bundle
from canvasrt.progress import listening
from tests.helpers.planned import plan


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_graphs_become_engines_that_share_their_disk_space(
    demo_graphs: Bundle, tmp_path: Path
) -> None:
    engines = build_bundle(
        demo_graphs.path, "cpu", tmp_path / "engines", BuildOptions(max_context=128, max_batch=2)
    )
    manifest = load_bundle(engines.path, kind="engines").manifest
    rewritten = {entry["file"] for entry in manifest.segments if entry["name"] != "vision"}
    for name, entry in demo_graphs.manifest.files.items():
        assert (manifest.files[name] == entry) == (name not in rewritten)
    assert manifest.segments[:-1] == demo_graphs.manifest.segments
    assert manifest.segments[-1] == {"name": "geometry", "file": "geometry.onnx"}
    assert manifest.target == {"name": "cpu", "backend": "onnxruntime"}
    assert manifest.options["max_context"] == 128
    assert manifest.options["max_batch"] == 2
    assert manifest.made_from["source"] == {"kind": "graphs", "digest": demo_graphs.manifest.digest}
    for name in set(manifest.files) - rewritten:
        assert engines.file(name).samefile(demo_graphs.file(name))


def test_a_checkpoint_is_exported_first_and_nothing_else_is_left(
    demo_graphs: Bundle, tmp_path: Path
) -> None:
    engines = build_bundle("demo", "cpu", tmp_path / "engines")
    assert everything_in(tmp_path) == ["engines"]
    assert (
        engines.manifest.files
        == build_bundle(demo_graphs.path, "cpu", tmp_path / "again").manifest.files
    )


def test_the_same_build_again_does_no_work(demo_graphs: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    first = build_bundle(demo_graphs.path, "cpu", out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    done: list[str] = []
    with listening(lambda what, *_: done.append(what)):
        again = build_bundle(demo_graphs.path, "cpu", out)
    assert again.manifest == first.manifest
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert not any("copying graphs" in what for what in done)


def test_what_a_killed_build_left_takes_no_space_from_the_next(
    demo_graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".out.partial-99999999"
    left.mkdir()
    monkeypatch.setattr(
        "canvasrt.pipeline.check_space", lambda *_: pytest.fail(f"left: {left.exists()}")
    )
    with pytest.raises(pytest.fail.Exception, match="left: False"):
        build_bundle(demo_graphs.path, "cpu", tmp_path / "out")


def test_another_build_into_the_same_folder_is_refused_with_the_difference(
    demo_graphs: Bundle, checkpoint_files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "engines"
    build_bundle(demo_graphs.path, "cpu", out, BuildOptions(max_batch=2))
    with pytest.raises(CanvasError, match="max_batch 2, now 3"):
        build_bundle(demo_graphs.path, "cpu", out, BuildOptions(max_batch=3))
    with pytest.raises(CanvasError, match="another checkpoint"):
        build_bundle(checkpoint_files, "cpu", out, BuildOptions(max_batch=2))


def test_what_is_damaged_is_neither_reused_nor_built_from(
    demo_graphs: Bundle, tmp_path: Path
) -> None:
    engines = build_bundle(demo_graphs.path, "cpu", tmp_path / "engines")
    file = engines.file(engines.manifest.segments[0]["file"])
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CanvasError, match=file.name):
        build_bundle(demo_graphs.path, "cpu", tmp_path / "engines")
    own = tmp_path / "graphs"
    shutil.copytree(demo_graphs.path, own)
    damaged = demo_graphs.manifest.segments[0]["file"]
    (own / damaged).write_bytes(b"short")
    with pytest.raises(CanvasError, match=damaged):
        build_bundle(own, "cpu", tmp_path / "out")
    assert everything_in(tmp_path) == ["engines", "graphs"]


def test_the_command_line_has_the_same_defaults() -> None:
    from canvasrt.cli.build import build as command

    parameters = inspect.signature(command).parameters
    for field in fields(BuildOptions):
        name = {"adapters": "adapter"}.get(field.name, field.name)
        assert (parameters[name].default or None) == (field.default or None), name


def test_a_plan_says_whether_it_fits(checkpoint_files: Path, tmp_path: Path) -> None:
    source = hash_source(find_source(checkpoint_files))
    on_cpu = plan(source, "cpu", tmp_path / "out")
    assert (on_cpu.fits, on_cpu.max_context) == (None, 256)  # the model's own limit
    data = plan(source, "rtx-5090", tmp_path / "out", BuildOptions(max_batch=2)).to_json()
    assert data["memory"]["total"] > data["memory"]["kv_cache"] > 0
    assert (data["precision"], data["builder"], data["fits"]) == ("nvfp4", "tensorrt-rtx", True)
