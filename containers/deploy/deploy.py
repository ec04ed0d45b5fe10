"""Runs a package as a container, waits until it is ready, and shows its log if it fails."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from canvasrt.containers.deploy.command import RESTART, run_command
from canvasrt.containers.deploy.container_engine import (
    ContainerEngine,
    check_container_engine,
    find_engine,
    last_line,
)
from canvasrt.containers.deploy.options import DEPLOY_TIMEOUT, DeployOptions
from canvasrt.containers.deploy.packages import Package, load, load_words, open_package
from canvasrt.containers.names import API_PORT, GRPC_PORT, HTTP_PORT
from canvasrt.containers.package.image_settings import PROBE
from canvasrt.containers.ports import PortRequest, check_distinct, listen, url_host
from canvasrt.errors import CanvasError
from canvasrt.progress import report

LOG_LINES = 20
_LOOK_EVERY = 1.0
# Each entry: phrases in a container engine's error, then our message and our hint for such an error.
_REFUSALS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("could not select device driver", "unresolvable cdi devices", "nvidia.com/gpu"),
        "the container engine cannot give GPUs to containers",
        "install NVIDIA's driver and the NVIDIA Container Toolkit, then run `nvidia-ctk runtime"
        " configure --runtime=docker` (podman: `nvidia-ctk cdi generate`) and restart docker",
    ),
    (
        ("port is already allocated", "address already in use"),
        "a port is in use",
        "stop the program that uses it, or give other ports with --port and --grpc-port",
    ),
    (
        ("is already in use by container", "name is already in use", "is already in use"),
        "a container of that name already exists",
        "remove it (ENGINE rm -f NAME), or give another name with --name",
    ),
    (
        ("exec format error", "image platform", "does not match the detected host platform"),
        "the image is for another architecture",
        "build and package for a target with this machine's architecture",
    ),
    (
        ("no such image", "pull access denied", "short-name", "name unknown"),
        "the image was not found",
        "load it first, or deploy the package's folder or archive",
    ),
)


def deploy(
    package: str,
    options: DeployOptions,
    *,
    engine: str | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Run a package, wait until it is ready, and return its addresses.

    timeout: seconds until the container must be ready; None means the `start_limit` of the image.

    Raises CanvasError if the container cannot start, exits, or is not ready in time. The container is then
    removed, and the error includes the last lines of its log.
    """
    chosen = find_engine(engine)
    found = open_package(package, chosen)
    check_architecture(found, chosen)
    # The restart policy is set only when the container is ready, so that a failed container can be inspected.
    words = run_command(found, options, chosen, restart=False)
    check_ports(options)
    report(f"loading {found.tag} into {chosen.name}")
    load(found, chosen)
    limit = start_limit(chosen, found.tag) if timeout is None else timeout
    started = time.monotonic()
    done = chosen.run(*words[1:])
    if done.returncode != 0:
        _remove_created(chosen, options.name, done.stderr)
        raise refusal(chosen, options.name, done.stderr)
    report("waiting until it is ready")
    wait_ready(chosen, options.name, limit)
    # podman can set the restart policy of a running container since 5.1.
    restarts = chosen.run("update", "--restart", RESTART, options.name).returncode == 0
    return {
        "name": options.name,
        "engine": chosen.name,
        "image": found.tag,
        "seconds": round(time.monotonic() - started, 1),
        "restarts": restarts,
        **addresses(options),
    }


def commands_of(package: str, options: DeployOptions, engine: str | None = None) -> list[str]:
    """Check what can be checked without a container engine, and return the shell commands that `deploy` would run."""
    check_container_engine(engine)
    chosen = ContainerEngine(engine or "docker")
    try:
        found = open_package(package, None)
    except CanvasError:
        if Path(package).exists():
            raise
        found = Package(package, None, "image", {}, None)
    store = "containers-storage" if chosen.name == "podman" else "docker-daemon"
    commands = [run_command(found, options, chosen)]
    if found.kind == "oci":
        commands.insert(0, ["skopeo", "copy", f"oci:{found.path}", f"{store}:{found.tag}"])
    elif found.path is not None:
        commands.insert(0, [chosen.name, *load_words(found)])
    return [*map(shlex.join, commands)]


def addresses(options: DeployOptions) -> dict[str, str]:
    """Return the addresses of a deployed package."""
    host = url_host(options.listen)
    if options.network == "none":
        return {}
    if options.network == "host":
        own = options.own_ports
        return {
            "openai": f"http://127.0.0.1:{own[API_PORT]}/v1",
            "grpc": f"127.0.0.1:{own[GRPC_PORT]}",
        }
    found = {"openai": f"http://{host}:{options.port}/v1"}
    for name, port in (("grpc", options.grpc_port), ("http", options.http_port)):
        if port is not None:
            found[name] = f"{host}:{port}"
    return found


def check_architecture(package: Package, engine: ContainerEngine) -> None:
    """Raise CanvasError if the image's architecture is not the machine's."""
    if package.architecture not in (None, engine.architecture):
        raise CanvasError(
            f"{package.tag} is for {package.architecture}, but this machine is {engine.architecture}",
            f"build and package for a target whose host is {engine.architecture}",
        )


def check_ports(options: DeployOptions) -> None:
    """Raise CanvasError if a port is in use, and UsageError if two options have the same port. Call this
    before building or loading anything."""
    names = {API_PORT: "--port", GRPC_PORT: "--grpc-port", HTTP_PORT: "--http-port"}
    if options.network == "none":
        return
    host = options.network == "host"
    outside = options.own_ports if host else options.published
    asked = [PortRequest(names[inside], options.listen, port) for inside, port in outside.items()]
    check_distinct(asked)
    for each in asked:
        listen(each.host, each.port, each.option).close()


def start_limit(engine: ContainerEngine, image: str) -> float:
    """Return the maximum seconds for a start: the health check's start period, but at least DEPLOY_TIMEOUT."""
    found = engine.inspect("image", image) or {}
    health = (found.get("Config") or {}).get("Healthcheck") or found.get("HealthCheck") or {}
    return max(DEPLOY_TIMEOUT, health.get("StartPeriod", 0) / 1e9)


def wait_ready(engine: ContainerEngine, name: str, timeout: float) -> None:
    """Wait until the container's health check passes. Removes the container if the check fails or the wait is
    interrupted."""
    deadline = time.monotonic() + timeout
    try:
        while (check := engine.run("exec", name, *PROBE)).returncode != 0:
            state = (engine.inspect("container", name) or {}).get("State") or {}
            if state.get("Running") and time.monotonic() <= deadline:
                time.sleep(_LOOK_EVERY)
                continue
            said = last_line(check.stdout + check.stderr)
            message = f"was not ready after {timeout:g} s (its health check: {said})"
            hint = "allow more time with --timeout; "
            if not state.get("Running"):
                cause = _cause(engine, name)
                message = f"ended with exit code {state.get('ExitCode')}" + (cause and f": {cause}")
                hint = ""
            log = engine.logs(name, LOG_LINES)
            raise CanvasError(
                f"the container {message}", f"{hint}the last lines of its log are above", log
            )
    except BaseException:
        engine.run("rm", "--force", name)
        raise


def refusal(engine: ContainerEngine, name: str, message: str) -> CanvasError:
    """Convert a container engine's message to an error with a hint."""
    text = message.lower()
    for marks, meaning, hint in _REFUSALS:
        if any(mark in text for mark in marks):
            hint = hint.replace("ENGINE", engine.name).replace("NAME", name)
            return CanvasError(f"{meaning} ({last_line(message)})", hint)
    return CanvasError(
        f"{engine.name} cannot start the container: {last_line(message)}",
        "--print shows the command",
    )


def _remove_created(engine: ContainerEngine, name: str, message: str) -> None:
    """Remove a container that docker created but could not start."""
    if "already in use" not in message or "port" in message.lower():
        state = (engine.inspect("container", name) or {}).get("State") or {}
        if state.get("Status") == "created":
            engine.run("rm", "--force", name)


def _cause(engine: ContainerEngine, name: str) -> str:
    """Return the last error in the container's log."""
    errors = [line for line in engine.logs(name, 200) if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""
