"""A package's wheels are pinned by hash, and a wheel with a different hash is refused."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from canvasrt.cache import cache_folder
from canvasrt.cli.package import _lines
from canvasrt.containers.image.base import Base
from canvasrt.containers.image.build import options_for
from canvasrt.containers.package import releases, wheels
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.package import package
from canvasrt.containers.package.requirements import (
    Pin,
    read_requirements,
    requirements,
    write_requirements,
)
from canvasrt.errors import CanvasError, UsageError
from tests.conftest import Command
from tests.containers.package.conftest import Relabelled

PLATFORMS = [(python, machine) for python in ("3.11", "3.12") for machine in ("amd64", "arm64")]


@pytest.mark.parametrize(("python", "architecture"), PLATFORMS)
def test_the_table_has_what_the_installed_versions_need(python: str, architecture: str) -> None:
    """If this fails after an update of constraints.txt, run .ci/lock-images."""
    for backend in ("onnxruntime", "tensorrt-rtx"):
        pins = requirements(
            {backend: None if backend == "onnxruntime" else "1.7.1.116"}, python, architecture
        )
        missing = [str(pin) for pin in pins if wheels.locked(pin, python, architecture) is None]
        # TensorRT-RTX has source distributions, which fetch wheels and have no hash here.
        assert all(name.startswith("tensorrt-rtx") for name in missing), missing


def test_files_fit_their_platform() -> None:
    table = json.loads(wheels.LOCK.read_text())
    for platform, entries in table.items():
        machine = {"amd64": "x86_64", "arm64": "aarch64"}[platform.partition("-")[2]]
        for pin, (file, digest) in entries.items():
            assert file.endswith((f"{machine}.whl", "-any.whl")), file
            assert len(bytes.fromhex(digest)) == 32
            assert re.sub(r"[_.]", "-", file).lower().startswith(re.sub(r"==|[_.]", "-", pin))


def test_a_package_s_requirements_have_hashes(packaged: Bundle) -> None:
    lines = (packaged.path / "requirements.txt").read_text().splitlines()
    assert len(lines) > 20
    assert all(" --hash=sha256:" in line for line in lines)
    assert (packaged.path / "requirements-unhashed.txt").read_text() == ""
    dockerfile = (packaged.path / "Dockerfile").read_text()
    assert "--require-hashes -r requirements.txt" in dockerfile
    assert "unhashed" not in dockerfile
    versions = {pin.name: pin.sha256 for pin in read_requirements(packaged.path)}
    bom = json.loads((packaged.path / "sbom.cdx.json").read_text())
    libraries = [each for each in bom["components"] if each["type"] == "library"]
    assert {each["name"]: each["hashes"][0]["content"] for each in libraries} == versions


def test_hashes_are_those_of_the_base_s_architecture(engines: Bundle, tmp_path: Path) -> None:
    """Engines for a CPU run on both architectures."""
    settings = {"Env": ["NVIDIA_TRITON_SERVER_VERSION=26.07"]}
    base = Base(Path("x"), {"architecture": "arm64", "config": settings}, (), "sha256:" + "b" * 64)
    made = package(engines.path, tmp_path / "package", options_for(base, PackageOptions()))
    (pin,) = [each for each in read_requirements(made.path) if each.name == "onnxruntime"]
    known = wheels.locked(pin, "3.12", "arm64")
    assert known
    assert pin.sha256 == known.sha256


def test_a_cpu_s_package_can_be_built_on_both_architectures(
    packaged: Bundle, relabelled: Relabelled, tmp_path: Path
) -> None:
    """pip accepts a file that matches any of the hashes."""
    gpu = package(relabelled("rtx-5090", "tensorrt-rtx", "1.7.1.116"), tmp_path / "gpu")
    for made, machines in ((packaged, ("amd64", "arm64")), (gpu, ("amd64",))):
        lines = (made.path / "requirements.txt").read_text().splitlines()
        (line,) = [each for each in lines if each.startswith("numpy==")]
        found = [
            wheels.locked(Pin(*line.split()[0].split("==")), "3.12", each) for each in machines
        ]
        assert line.split()[1:] == [f"--hash=sha256:{each.sha256}" for each in found if each]


def test_what_has_no_known_hash_is_installed_apart(tmp_path: Path) -> None:
    pins = [Pin("a", "1", sha256="0" * 64), Pin("b", "2")]
    write_requirements(tmp_path, pins)
    assert (tmp_path / "requirements.txt").read_text() == f"a==1 --hash=sha256:{'0' * 64}\n"
    assert (tmp_path / "requirements-unhashed.txt").read_text() == "b==2\n"
    assert read_requirements(tmp_path) == pins


def wheel(folder: Path, name: str, text: str = "") -> Path:
    """Write a wheel that pip can install."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(
            f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        )
        archive.writestr(
            f"{name}-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{name}-1.dist-info/RECORD", "")
    return file


def test_pip_refuses_another_file_with_the_lines_of_a_package(tmp_path: Path) -> None:
    good = wheel(tmp_path / "good", "canvasrthashed")
    digest = hashlib.sha256(good.read_bytes()).hexdigest()
    write_requirements(tmp_path, [Pin("canvasrthashed", "1", sha256=digest)])
    wheel(tmp_path / "evil", "canvasrthashed", "print('owned')")
    for place, code in (("good", 0), ("evil", 1)):
        places = ("--find-links", tmp_path / place, "--target", tmp_path / f"in-{place}")
        wanted = ("--require-hashes", "-r", tmp_path / "requirements.txt")
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
        done = subprocess.run([*command, *places, *wanted], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path / "cache"))
    return cache_folder() / "wheels" / "cp312-amd64"


def test_a_wheel_that_was_replaced_in_the_cache_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = wheel(cache, "canvasrthashed")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    table = {"cp3.12-amd64": {"canvasrthashed==1": [file.name, digest]}}
    monkeypatch.setattr(wheels, "_table", lambda: table)
    pin = Pin("canvasrthashed", "1")
    fetched = wheels.fetch([pin], "3.12", "amd64")
    assert fetched == {pin: file}
    wheel(cache, "canvasrthashed", "import os")
    with pytest.raises(CanvasError, match="SHA-256 differs"):
        wheels.fetch([pin], "3.12", "amd64")


def test_a_wheel_is_not_taken_before_it_is_complete(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look for the wheel while pip downloads it, and pip may be interrupted."""
    pin = Pin("canvasrthashed", "1")
    said = "ERROR: No space left on device"

    def pip(command: list[str], wanted: list[str]) -> str:
        wheel(Path(command[-1]), pin.name)
        assert not list(cache.glob("*.whl"))
        return said

    monkeypatch.setattr(wheels, "_pip", pip)
    with pytest.raises(CanvasError, match="No space left"):
        wheels.fetch([pin], "3.12", "amd64")
    assert list(cache.iterdir()) == []
    said = ""
    (found,) = wheels.fetch([pin], "3.12", "amd64").values()
    assert list(cache.iterdir()) == [found]


def test_hashes_of_fetched_wheels_win(cache: Path) -> None:
    file = wheel(cache, "canvasrthashed")
    (pin,) = pins = [Pin("canvasrthashed", "1")]
    assert wheels.with_hashes(pins, {}, "3.12", "amd64")[0].sha256 == ""
    (found,) = wheels.with_hashes(pins, {pin: file}, "3.12", "amd64")
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


DIGEST = "@sha256:" + "a" * 64


def test_a_base_can_be_named_by_its_digest(
    engines: Bundle, tmp_path: Path, command: Command
) -> None:
    name = "nvcr.io/nvidia/tritonserver:26.07-py3"
    assert releases.tensorrt_of_name(name + DIGEST) == releases.tensorrt_of_name(name)
    assert releases.python_of_name(name + DIGEST) == "3.12"
    assert releases.tensorrt_of_name(name + "@sha256:12") is None
    assert releases.digest_of_name(name + DIGEST) == DIGEST.partition(":")[2]
    assert releases.digest_of_name(name) == ""
    done = command("package", engines.path, "-o", tmp_path / "out", "--base", name + DIGEST)
    assert done.returncode == 0, done.stderr
    assert "note:" not in done.stdout
    assert f"ARG BASE_IMAGE={name}{DIGEST}\n" in (tmp_path / "out" / "Dockerfile").read_text()
    bom = json.loads((tmp_path / "out" / "sbom.cdx.json").read_text())
    (base,) = [each for each in bom["components"] if each["type"] == "container"]
    assert (base["name"], base["version"]) == (name, DIGEST[1:])
    assert base["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]


@pytest.mark.parametrize("digest", ["@sha256:12", "@sha256:" + "A" * 64, "@" + "a" * 64, "@latest"])
def test_a_malformed_digest_is_refused(digest: str) -> None:
    with pytest.raises(UsageError, match="digest is malformed"):
        PackageOptions().on("triton:1" + digest)


def test_a_base_that_may_change_is_noted_as_it_is_in_the_dockerfile(
    relabelled: Relabelled, tmp_path: Path, command: Command
) -> None:
    """Engines of an older TensorRT get an older base image, which is named by its tag instead of its digest."""
    engines = relabelled("h100", "tensorrt", "11.1.0.106")
    done = command("package", engines, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"note: {releases.REPOSITORY}:26.07-py3 is a tag" in done.stdout
    dockerfile = (tmp_path / "out" / "Dockerfile").read_text("utf-8")
    assert f"ARG BASE_IMAGE={releases.REPOSITORY}:26.07-py3\n" in dockerfile
    done = command("package", engines, "-o", tmp_path / "again", "--json")
    assert json.loads(done.stdout)["base_pinned"] is False


def test_the_default_base_is_the_newest_release_that_is_known() -> None:
    assert releases.DEFAULT_BASE.startswith(f"{releases.REPOSITORY}:{releases.NEWEST}")
    assert max(releases.TENSORRT) <= releases.NEWEST
    shown = {"path": "p", "tag": "t", "format": "context", "bytes": 1, "base_pinned": False}
    *_, last = _lines(shown | {"base": releases.DEFAULT_BASE})
    assert last.endswith(f"on {releases.READ}")
