"""docker and podman for tests, with a temporary daemon if none answers, and calls from inside a container's network."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench import daemon
from canvasrt.containers.deploy.container_engine import ContainerEngine, find_engine
from canvasrt.errors import CanvasError
from tests.helpers.ci import in_ci

# For machines without systemd on which a container runtime can neither raise limits nor create a bridge.
_CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--user", "1000:1000", "--network", "none", "--shm-size", "256m"),
    *("--env", "CANVASRT_THREADS=1", "--health-interval", "2s"),
)


def missing(what: str) -> NoReturn:
    """Skip a test whose tools are missing; in CI, fail it."""
    if in_ci():
        pytest.fail(f"CI is set, and {what}")
    pytest.skip(what)


@contextlib.contextmanager
def docker() -> Iterator[ContainerEngine]:
    """Provide docker with the machine's daemon, or else with one started for these tests. Skips if neither is
    possible."""
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(daemon.docker(scratch()))
        except CanvasError as error:
            missing(f"{error.message} (apt: docker.io)")
        yield engine


def scratch() -> Path | None:
    """Return a folder in memory if there is enough, since writing an image's many small files to a disk is slow."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 8 * 10**9
    return memory if roomy else None


@contextlib.contextmanager
def podman() -> Iterator[ContainerEngine]:
    """Provide podman, configured for a machine without systemd. Skips if podman is missing."""
    if shutil.which("podman") is None or shutil.which("runc") is None or os.geteuid() != 0:
        missing("podman and runc are not installed, or not root (apt: podman runc)")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="podman-", dir=scratch()) as folder,
    ):
        settings = Path(folder) / "containers.conf"
        settings.write_text(_CONTAINERS_CONF)
        storage = Path(folder) / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        )
        patch.setenv("CONTAINERS_CONF", str(settings))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield find_engine("podman")
        subprocess.run(["podman", "system", "reset", "--force"], capture_output=True)
        subprocess.run(["umount", "-q", f"{folder}/graph/overlay"], capture_output=True)


@contextlib.contextmanager
def container(engine: ContainerEngine, image: str, *options: str) -> Iterator[str]:
    """Run a container; provide its id, and remove it at the end."""
    name = engine.out("run", "--detach", *options, image).strip()
    try:
        yield name
    finally:
        engine.run("rm", "--force", "--volumes", name)


def state(engine: ContainerEngine, name: str) -> dict[str, Any]:
    """Return a container's state as the engine reports it."""
    found = engine.inspect("container", name)
    assert found is not None
    return found["State"]


def inside(engine: ContainerEngine, name: str, code: str, timeout: float = 120) -> Any:
    """Run Python code with the tests' packages in a container's network. Return the last output line, parsed as
    JSON."""
    process = enter(engine, name, code)
    out, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, out
    return json.loads(out.splitlines()[-1])


def enter(engine: ContainerEngine, name: str, code: str) -> subprocess.Popen[str]:
    """Like `inside`, but returns the running process."""
    pid = str(state(engine, name)["Pid"])
    command = ["nsenter", "--target", pid, "--net", sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
