"""Calls docker or podman on this machine through its command line."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from canvasrt.containers.names import ARCHITECTURES, END_UNHEALTHY
from canvasrt.errors import CanvasError, UsageError

CONTAINER_ENGINES = ("docker", "podman")


@dataclass(frozen=True)
class ContainerEngine:
    """A container engine. `name` is `docker` or `podman`."""

    name: str

    def run(
        self, *arguments: str, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the container engine."""
        return subprocess.run(
            [self.name, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def out(self, *arguments: str) -> str:
        """Return the output of a command. Raises CanvasError if it fails."""
        done = self.run(*arguments)
        if done.returncode != 0:
            raise CanvasError(
                f"{self.name} {arguments[0]} failed: {last_line(done.stderr)}",
                f"run it yourself: {shlex.join([self.name, *arguments])}",
            )
        return done.stdout

    def inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return the details of an image or a container; None if it does not exist."""
        done = self.run(kind, "inspect", name)
        if done.returncode != 0:
            return None
        (found,) = json.loads(done.stdout)
        return found

    @cached_property
    def architecture(self) -> str:
        """The architecture of the engine's host: amd64 or arm64."""
        query = "{{.Architecture}}" if self.name == "docker" else "{{.Host.Arch}}"
        name = self.out("info", "--format", query).strip()
        return ARCHITECTURES.get(name, name)

    def gpu_options(self, gpus: str) -> list[str]:
        """Return the options that give a container GPUs. `gpus` is `all`, or numbers separated by commas."""
        if self.name == "podman":  # podman uses names of the Container Device Interface
            devices = [f"--device=nvidia.com/gpu={each}" for each in gpus.split(",")]
            # Without this option, SELinux denies access to the devices, according to NVIDIA's manual.
            return [*devices, "--security-opt", "label=disable"]
        return ["--gpus", "all" if gpus == "all" else f'"device={gpus}"']

    def health_options(self) -> list[str]:
        """Return the options with which the health check ends a dead server.

        Killing a server that ignores SIGTERM requires an init process. podman has one only if catatonit is installed.
        """
        init = [] if self.name == "podman" else ["--init"]
        return [*init, "--env", f"{END_UNHEALTHY}=1"]

    def logs(self, container: str, lines: int) -> list[str]:
        """Return the last lines of a container's log."""
        done = self.run("logs", "--tail", str(lines), container)
        return (done.stdout + done.stderr).splitlines()[-lines:]


def check_container_engine(name: str | None) -> None:
    """Raise UsageError unless `name` is None or a known container engine."""
    if name is not None and name not in CONTAINER_ENGINES:
        raise UsageError(f"unknown engine {name!r}", f"give one of {', '.join(CONTAINER_ENGINES)}")


def find_engine(name: str | None = None) -> ContainerEngine:
    """Return the engine called `name`; by default docker, or podman if docker is unavailable. Raises CanvasError if no
    engine answers."""
    check_container_engine(name)
    reasons = []
    for each in (name,) if name else CONTAINER_ENGINES:
        if shutil.which(each) is None:
            reasons.append(f"{each} is not installed")
            continue
        engine = ContainerEngine(each)
        done = engine.run("info", "--format", "{{json .}}")
        # Without a daemon, the docker client exits with 0, and only its output contains the error.
        if done.returncode == 0 and '"ServerErrors"' not in done.stdout:
            return engine
        reasons.append(f"{each} does not answer ({last_line(done.stderr + _errors(done.stdout))})")
    raise CanvasError(
        f"no container engine is available: {'; '.join(reasons)}",
        "install docker or podman, start docker's daemon, or join the group docker;"
        " --print shows the command to run on another machine",
    )


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), "no output")


def _errors(text: str) -> str:
    try:
        return "\n".join(json.loads(text).get("ServerErrors") or ())
    except (ValueError, AttributeError):
        return ""
