"""The `docker run` command for a package, with as few privileges as serving needs."""

from __future__ import annotations

import shlex
from pathlib import Path

from canvasrt.containers.deploy.container_engine import ContainerEngine
from canvasrt.containers.deploy.options import DeployOptions
from canvasrt.containers.deploy.packages import Package
from canvasrt.containers.names import API_PORT, GRPC_PORT, HTTP_PORT, LOOPBACK, PACKAGE
from canvasrt.containers.package import image_settings as image
from canvasrt.containers.package.sizes import TEMPORARY
from canvasrt.errors import CanvasError

RESTART = "unless-stopped"
_PIDS = 4096
# These options rotate logs. docker's default driver keeps logs without limit.
_LOGS = {
    "docker": ["--log-driver", "local", "--log-opt", "max-size=32m", "--log-opt", "max-file=4"],
    "podman": ["--log-driver", "k8s-file", "--log-opt", "max-size=128m"],
}


def run_command(
    package: Package, options: DeployOptions, engine: ContainerEngine, restart: bool = True
) -> list[str]:
    """Return the arguments of `docker run …`. Raises CanvasError for a missing file or folder."""
    words = [engine.name, "run", "--detach", "--name", options.name]
    words += ["--restart", RESTART] if restart else []
    words += engine.health_options()
    words += ["--stop-timeout", str(image.STOP_GRACE), *_hardening(options)]
    if package.needs_gpu:
        words += engine.gpu_options(options.gpus)
    words += _network(options)
    words += _LOGS[engine.name]
    if options.network == "host" and options.port != API_PORT:
        words += ["--env", f"NIM_SERVER_PORT={options.port}"]  # also read by the health check
    for name, text in options.environment.items():
        words += ["--env", f"{name}={text}"]
    # Hosts with podman often enforce SELinux, which lets a container read only folders labelled for containers.
    label = ",z" if engine.name == "podman" else ""
    words += ["--volume", f"{_cache(options.cache)}:{image.CACHE}:rw{label}"]
    engines = options.engines or package.engines
    if engines is not None:
        words += ["--volume", f"{_folder(engines)}:{PACKAGE}/engines:ro{label}"]
    for variable in options.variables:
        words += ["--env", variable]
    if options.variables_file is not None:
        if not options.variables_file.is_file():
            raise CanvasError(
                f"--env-file {options.variables_file} does not exist",
                "give a file with NAME=VALUE lines",
            )
        words += ["--env-file", str(options.variables_file)]
    words.append(package.tag)
    if options.opens_triton:
        words += [*image.COMMAND, "--triton-host", "0.0.0.0"]  # noqa: S104
    elif options.network == "host":
        own = options.own_ports
        words += [*image.COMMAND, "--host", options.listen]
        if any(a != b for a, b in own.items()):
            words += ["--grpc-port", str(own[GRPC_PORT]), "--http-port", str(own[HTTP_PORT])]
            words += ["--metrics-port", "0"]
    return words


def _hardening(options: DeployOptions) -> list[str]:
    words = ["--read-only", "--tmpfs", f"/tmp:size={TEMPORARY}", "--cap-drop", "ALL"]
    words += ["--security-opt", "no-new-privileges", "--pids-limit", str(_PIDS)]
    words += ["--shm-size", options.shm_size]
    if options.memory is not None:
        words += ["--memory", options.memory]
    if options.cpus is not None:
        words += ["--cpus", f"{options.cpus:g}"]
    return words


def _network(options: DeployOptions) -> list[str]:
    words = [] if options.network is None else ["--network", options.network]
    if options.network in ("host", "none"):
        return words  # ports can only be published from a container's own network
    # docker and podman do not accept host names in --publish.
    listen = options.listen.replace("localhost", LOOPBACK[0])
    listen = f"[{listen}]" if ":" in listen else listen
    for inside, outside in options.published.items():
        words += ["--publish", f"{listen}:{outside}:{inside}"]
    return words


def _cache(cache: str) -> str:
    """Return the cache as a volume's name or a folder's absolute path. Raises CanvasError for an unusable folder."""
    if "/" not in cache and not cache.startswith("."):
        return cache
    folder = Path(cache).expanduser().resolve()
    if not folder.is_dir():
        quoted = shlex.quote(str(folder))
        raise CanvasError(
            f"cache folder {folder} does not exist",
            f"run mkdir -p {quoted} && chown {image.USER} {quoted}, or give the name of a volume",
        )
    status = folder.stat()
    if not (status.st_mode & 0o002 or (status.st_uid == image.USER and status.st_mode & 0o200)):
        raise CanvasError(
            f"the container runs as user {image.USER}, which cannot write to {folder}",
            f"run chown {image.USER} {shlex.quote(str(folder))}",
        )
    return str(folder)


def _folder(path: Path) -> Path:
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise CanvasError(
            f"--engines {path} is not a folder", "give the folder that `canvasrt build` wrote"
        )
    return path
