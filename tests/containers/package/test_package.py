"""The output of `canvasrt package` is complete, checked, and identical for every run."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.cli.app import run
from canvasrt.cli.package import _lines
from canvasrt.containers.package.package import package
from canvasrt.containers.package.repository import model_config
from canvasrt.containers.package.wheel import write_wheel
from canvasrt.containers.tensors import inputs_of, outputs_of
from canvasrt.errors import CanvasError, UsageError


def test_a_package_holds_all_that_docker_build_needs(packaged: Bundle, engines: Bundle):
    names = set(packaged.manifest.files)
    assert {f"engines/{name}" for name in engines.manifest.files} <= names
    assert {
        "Dockerfile",
        "requirements.txt",
        "engines/manifest.json",
        "models/canvasrt/config.pbtxt",
        "models/canvasrt/1/model.py",
        "models/canvasrt_stream/config.pbtxt",
        "models/canvasrt_stream/1/model.py",
    } <= names
    dockerfile = (packaged.path / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", dockerfile, re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (packaged.path / source).exists()
    assert "\nUSER 1000:1000\n" in dockerfile
    assert "\nHEALTHCHECK " in dockerfile
    assert "canvasrt.containers.serve.probe" in dockerfile


def test_its_engines_are_a_bundle_of_their_own(packaged: Bundle, engines: Bundle):
    inside = load_bundle(packaged.path / "engines", kind="engines")
    assert inside.manifest.digest == engines.manifest.digest
    assert packaged.manifest.made_from == {"engines": engines.manifest.digest}
    for segment in packaged.manifest.segments:
        assert segment["file"] in packaged.manifest.files


def test_it_is_the_same_every_time(engines: Bundle, tmp_path: Path):
    made = [package(engines.path, tmp_path / name).manifest for name in ("one", "two")]
    assert made[0].files == made[1].files
    assert made[0].digest == made[1].digest


def test_damaged_engines_are_refused(engines: Bundle, tmp_path: Path):
    first = package(engines.path, tmp_path / "first").path
    head = first / "engines" / "head.bin"
    content = head.read_bytes()
    head.unlink()  # hard link: writing would damage the others
    head.write_bytes(content[:-1] + b"\xff")
    with pytest.raises(CanvasError, match=r"head\.bin"):
        package(first / "engines", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_wheel_installs_and_runs(tmp_path: Path):
    wheel = write_wheel(tmp_path / "wheels")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*command, "--target", tmp_path / "site", wheel], check=True)
    code = "import canvasrt.containers.serve.serve as serve; print(serve.__file__)"
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")
    names = zipfile.ZipFile(wheel).namelist()
    assert "canvasrt/containers/templates/Dockerfile" in names
    assert "canvasrt/runtime/generator.py" in names
    assert not [name for name in names if "__pycache__" in name or "safetensors" in name]
    # The licence must be part of every image.
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


@pytest.mark.parametrize("model", ["canvasrt", "canvasrt_stream"])
def test_a_model_configuration_declares_every_tensor(model: str):
    config = model_config(model, {})
    for tensor in (*inputs_of(model), *outputs_of(model)):
        assert f'name: "{tensor.name}" data_type: {tensor.config_type}' in config
    assert ("decoupled: true" in config) == (model == "canvasrt_stream")


def test_nothing_cannot_be_packaged(tmp_path: Path):
    with pytest.raises(UsageError, match="no bundle was given"):
        package([], tmp_path / "out")


def test_an_output_with_content_is_refused_before_a_bundle_is_read(
    engines: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(CanvasError, match="is not empty"):
        package(tmp_path / "none", engines.path)
    assert run(["create-model-store", str(tmp_path / "none"), "-m", str(engines.path)]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_the_commands_it_prints_can_be_pasted():
    shown = {"path": "/a b/image", "tag": "me:1", "format": "docker", "image_digest": "sha256:0"}
    sizes = {"added_bytes": 1, "engine_bytes": 1, "other_bytes": 0, "attestation": None}
    said = list(_lines(shown | sizes))
    assert "  docker load -i '/a b/image'" in said
    assert "  canvasrt deploy '/a b/image'" in said
