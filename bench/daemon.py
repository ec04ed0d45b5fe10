"""A temporary docker daemon, for machines with docker installed but not running, such as build
servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from canvasrt.containers.deploy.container_engine import ContainerEngine, find_engine, last_line
from canvasrt.errors import CanvasError

# The daemon creates no network; its containers use the host's network, or none.
_OPTIONS = ("--iptables=false", "--ip6tables=false", "--bridge=none")
_PATIENCE = 30.0


@contextmanager
def docker(scratch: Path | None = None) -> Iterator[ContainerEngine]:
    """Provide docker; if no daemon answers, start one until the block ends.

    `scratch` is the folder for its images. Raises CanvasError without root or `dockerd`.
    """
    found = None
    try:
        found = find_engine("docker")
    except CanvasError:
        if shutil.which("docker") is None or shutil.which("dockerd") is None or os.geteuid() != 0:
            raise
    if found is not None:
        yield found
        return
    before = os.environ.get("DOCKER_HOST")
    temporary = tempfile.TemporaryDirectory(prefix="dockerd-", dir=scratch)
    with temporary as folder, _daemon(Path(folder)) as address:
        os.environ["DOCKER_HOST"] = address
        try:
            yield find_engine("docker")
        finally:
            os.environ.pop("DOCKER_HOST")
            if before is not None:
                os.environ["DOCKER_HOST"] = before


@contextmanager
def _daemon(folder: Path) -> Iterator[str]:
    socket = folder / "socket"
    own = ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
    command = ["dockerd", *_OPTIONS, *own, "--pidfile", str(folder / "pid")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", f"unix://{socket}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C must reach only this process
        )
    try:
        deadline = time.monotonic() + _PATIENCE
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                reason = last_line((folder / "log").read_text(errors="replace"))
                raise CanvasError(f"cannot start dockerd: {reason}", "start docker yourself")
            time.sleep(0.1)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait(_PATIENCE)
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """Unmount what the daemon leaves mounted for the host's network."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    mounts = [line.split()[1] for line in lines]
    for mount in reversed([each for each in mounts if each.startswith(f"{folder}/")]):
        subprocess.run(["umount", "--lazy", mount], capture_output=True)
