"""The wheel contains all files, and no top-level package with a name like `build` or `export`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from canvasrt.checkpoints.locate import BUNDLED

ROOT = Path(__file__).parent.parent
STAGES = ("export", "build", "runtime", "containers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout without build leftovers, which could add files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", folder, source]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    names = names_in(wheel)
    for folder in ("canvasrt", *STAGES):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            assert (name if folder == "canvasrt" else f"canvasrt/{name}") in names


def test_every_data_file_is_in_the_wheel(wheel: Path) -> None:
    names = names_in(wheel)
    assert "canvasrt/py.typed" in names
    checkpoints = [(f"canvasrt/demo/{folder}", "") for folder in BUNDLED.values()]
    for folder, prefix in (*checkpoints, ("containers/templates", "canvasrt/")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files, folder
        for path in files:
            assert prefix + path.relative_to(ROOT).as_posix() in names


def test_only_canvasrt_is_importable(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"canvasrt"}


def test_the_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
import canvasrt, canvasrt.build, canvasrt.runtime
assert canvasrt.__file__.startswith(sys.argv[1]), canvasrt.__file__
assert canvasrt.build.__file__.startswith(sys.argv[1]), canvasrt.build.__file__
for name in ("export", "runtime", "containers"):
    assert importlib.util.find_spec(name) is None, name
from canvasrt.checkpoints.locate import find_checkpoint
from canvasrt.cli.app import run
print(find_checkpoint("demo"))
sys.exit(run(["targets"]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))


def test_the_entry_point(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    entry = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert b"canvasrt = canvasrt.__main__:main" in archive.read(entry)


def test_requirements_stay_small() -> None:
    """Every user installs the requirements, so none may take hundreds of megabytes or support only some machines."""
    base = " ".join(PROJECT["project"]["dependencies"])
    for heavy in ("torch", "onnx", "transformers", "tensorrt", "triton", "nvidia"):
        assert heavy not in base
    assert {"cpu", "gpu", "export", "rtx", "tensorrt", "serve", "test"} <= set(
        PROJECT["project"]["optional-dependencies"]
    )


def test_constraints_pin_every_requirement() -> None:
    pins = [line for line in CONSTRAINTS if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", pin) for pin in pins)
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("cpu", "gpu", "export", "rtx", "tensorrt", "serve", "sorted", "test"):
        wanted += extras[extra]
    for requirement in wanted:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert name.group().lower().replace("_", "-") in pinned, requirement


def test_a_gpu_machine_gets_what_its_first_ten_minutes_need() -> None:
    """The install commands of docs/hardware.md include the extra for serving."""
    page = (ROOT / "docs" / "hardware.md").read_text("utf-8")
    lines = re.findall(r"^pip install .* -e '\.\[(.*)\]'", page, re.M)
    assert len(lines) == 2
    for extras in lines:
        assert {"export", "serve", "gpu"} <= set(extras.split(","))


def test_the_pinned_tensorrt_is_in_an_image_that_triton_runs_in() -> None:
    """TensorRT loads only engines of exactly its version, so engines of any other version could not be packaged."""
    from canvasrt.containers.package.releases import DEFAULT_BASE, base_for

    pins = dict(line.split("==") for line in CONSTRAINTS if "==" in line)
    built = {"name": "h100", "backend": "tensorrt", "builder_version": pins["tensorrt"]}
    assert base_for([built]) != DEFAULT_BASE


def test_the_version_is_the_same_everywhere() -> None:
    import canvasrt

    assert PROJECT["project"]["version"] == canvasrt.__version__


def test_the_lock_names_every_constraint_with_its_hashes() -> None:
    """If this fails, run `.ci/lock`, which writes the lock file."""
    wanted = {
        re.sub(r"[-_.]+", "-", line).lower()
        for line in CONSTRAINTS
        if not line.startswith(("#", "torch==", "onnxruntime-gpu==", "tensorrt=="))
    }
    text = (ROOT / "requirements.lock").read_text().replace(" \\\n", " ")
    entries = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert {re.sub(r"[-_.]+", "-", words[0]).lower() for words in entries} == wanted
    for words in entries:
        hashes = [word for word in words if word.startswith("--hash=sha256:")]
        assert hashes, words[0]
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in hashes)


def test_make_installs_by_hash() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    installs = [line for line in lines if "pip install" in line and "$(BIN)" in line]
    assert any("--require-hashes --no-deps -r requirements.lock" in line for line in installs)
    # Only torch and pip are installed without hashes. For other commands without hashes, all packages are already
    # installed.
    others = [line for line in installs if "--require-hashes" not in line]
    assert all(
        "-c constraints.txt" in line or "--upgrade pip" in line or "--no-deps" in line
        for line in others
    )
