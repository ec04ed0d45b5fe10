"""`canvasrt deploy`: runs a package, waits until it is ready, and shows its log when it fails."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from canvasrt.containers.deploy.command import RESTART, Options, run_command
from canvasrt.containers.deploy.engine import Engine, find_engine, last_line
from canvasrt.containers.deploy.packages import Package, load, open_package
from canvasrt.containers.package.settings import ImageSettings
from canvasrt.containers.ports import listen
from canvasrt.errors import CanvasError
from canvasrt.progress import Progress, no_progress

LOG_LINES = 20
_LOOK_EVERY = 1.0
# What an engine says → what that means.
_REFUSALS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("could not select device driver", "unresolvable cdi devices", "nvidia.com/gpu"),
        "the container engine cannot give GPUs to containers",
        "install NVIDIA's driver and the NVIDIA Container Toolkit, then run `nvidia-ctk runtime"
        " configure --runtime=docker` (podman: `nvidia-ctk cdi generate`) and restart it",
    ),
    (
        ("port is already allocated", "address already in use"),
        "a port is in use",
        "stop what listens there, or give other ports with --port and --grpc-port",
    ),
    (
        ("is already in use by container", "name is already in use", "is already in use"),
        "there is a container of that name already",
        "remove it (docker rm -f NAME), or give another with --name",
    ),
    (
        ("exec format error", "image platform", "does not match the detected host platform"),
        "the image is for another architecture",
        "package engines of a target with this machine's architecture",
    ),
    (
        ("no such image", "pull access denied", "short-name", "name unknown"),
        "the image is not there",
        "load it first, or deploy the package's folder or archive",
    ),
)


def deploy(
    package: str,
    options: Options,
    *,
    engine: str | None = None,
    timeout: float = 3600.0,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Runs a package and returns where it listens, once it is ready.

    CanvasError when it cannot be started, ends by itself, or is not ready after `timeout` seconds: the
    container's last lines are then on stderr, and the container is gone.
    """
    chosen = find_engine(engine)
    found = open_package(package, chosen)
    check_architecture(found, chosen)
    # A container that fails must stay ended, to be seen: it is to be restarted only once it was ready.
    words = run_command(found, options, chosen, restart=False)
    check_ports(options)
    progress(f"loading {found.tag} into {chosen.name}", 0, 0)
    load(found, chosen)
    started = time.monotonic()
    done = chosen.run(*words[1:])
    if done.returncode != 0:
        _forget(chosen, options.name, done.stderr)
        raise refusal(chosen, options.name, done.stderr)
    progress("waiting until it is ready", 0, 0)
    wait_ready(chosen, options.name, timeout)
    chosen.run(
        "update", "--restart", RESTART, options.name
    )  # podman's systemd units do that instead
    return {
        "name": options.name,
        "engine": chosen.name,
        "image": found.tag,
        "seconds": round(time.monotonic() - started, 1),
        **addresses(options),
    }


def shown(package: str, options: Options, engine: str | None = None) -> list[str]:
    """The commands that `deploy` would run, for a shell; they are checked only as far as that goes."""
    chosen = Engine(engine or "docker")
    try:
        found = open_package(package, None)
    except CanvasError:
        if Path(package).exists():
            raise
        found = Package(package, None, "image", {}, None)
    first = {
        "context": f"{chosen.name} build --tag {shlex.quote(found.tag)} {shlex.quote(package)}",
        "docker": f"{chosen.name} load --input {shlex.quote(package)}",
        "oci": f"skopeo copy oci:{shlex.quote(package)} docker-daemon:{shlex.quote(found.tag)}",
    }
    commands = [first[found.kind]] if found.kind in first else []
    return [*commands, shlex.join(run_command(found, options, chosen))]


def addresses(options: Options) -> dict[str, str]:
    """Where a deployed package listens."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.listen, options.listen)
    if options.network == "none":
        return {}
    if options.network == "host":
        own = Options()
        return {"openai": f"http://127.0.0.1:{own.port}/v1", "grpc": f"127.0.0.1:{own.grpc_port}"}
    found = {"openai": f"http://{host}:{options.port}/v1"}
    for name, port in (("grpc", options.grpc_port), ("http", options.http_port)):
        if port is not None:
            found[name] = f"{host}:{port}"
    return found


def check_architecture(package: Package, engine: Engine) -> None:
    """CanvasError for an image of another architecture than the machine's."""
    if package.architecture not in (None, engine.architecture):
        raise CanvasError(
            f"{package.tag} is for {package.architecture}, and this machine is {engine.architecture}",
            f"package engines of a target whose host is {engine.architecture};"
            " `canvasrt targets` lists them",
        )


def check_ports(options: Options) -> None:
    """CanvasError for a port in use, before anything is built or loaded."""
    names = {8000: "--port", 8001: "--grpc-port", 8080: "--http-port", 8002: "--metrics-port"}
    if options.network == "none":
        return
    host = options.network == "host"
    for inside, outside in options.published.items():
        address = "0.0.0.0" if host else options.listen
        listen(address, inside if host else outside, names[inside]).close()


def wait_ready(
    engine: Engine, name: str, timeout: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Returns once the container's own health check passes."""
    probe = ImageSettings({}, gpu=False).probe
    deadline = time.monotonic() + timeout
    while engine.run("exec", name, *probe).returncode != 0:
        state = (engine.inspect("container", name) or {}).get("State") or {}
        if not state.get("Running"):
            code = state.get("ExitCode")
            cause, log = _cause(engine, name), engine.logs(name, LOG_LINES)
            engine.run("rm", "--force", name)
            raise CanvasError(
                f"the container ended with exit code {code}" + (f": {cause}" if cause else ""),
                "its last lines are above",
                log,
            )
        if time.monotonic() > deadline:
            log = engine.logs(name, LOG_LINES)
            engine.run("rm", "--force", name)
            raise CanvasError(
                f"the container was not ready after {timeout:g} s",
                "allow more with --timeout; its last lines are above",
                log,
            )
        sleep(_LOOK_EVERY)


def refusal(engine: Engine, name: str, said: str) -> CanvasError:
    """What an engine's refusal means."""
    text = said.lower()
    for marks, meaning, hint in _REFUSALS:
        if any(mark in text for mark in marks):
            return CanvasError(f"{meaning} ({last_line(said)})", hint.replace("NAME", name))
    return CanvasError(
        f"{engine.name} cannot start the container: {last_line(said)}",
        "--print shows the command",
    )


def _forget(engine: Engine, name: str, said: str) -> None:
    """docker leaves a container behind that it created and could not start."""
    if "already in use" not in said or "port" in said.lower():
        state = (engine.inspect("container", name) or {}).get("State") or {}
        if state.get("Status") == "created":
            engine.run("rm", "--force", name)


def _cause(engine: Engine, name: str) -> str:
    """The container's own last error."""
    errors = [line for line in engine.logs(name, 200) if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""
