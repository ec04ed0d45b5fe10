"""The command that runs a package: hardened as far as serving allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canvasrt.containers.deploy.engine import Engine
from canvasrt.containers.deploy.packages import Package
from canvasrt.containers.names import PACKAGE
from canvasrt.containers.package import settings as image
from canvasrt.errors import CanvasError, UsageError

VOLUME = "canvasrt-cache"
RESTART = "unless-stopped"


@dataclass(frozen=True)
class Options:
    """The options of `canvasrt deploy`."""

    name: str = "canvasrt"
    listen: str = "127.0.0.1"
    port: int = image.API_PORT
    grpc_port: int | None = image.GRPC_PORT
    http_port: int | None = None
    metrics_port: int | None = None
    gpus: str = "all"
    cache: str = VOLUME
    engines: Path | None = None
    shm_size: str = "1g"
    memory: str | None = None
    cpus: float | None = None
    pids: int = 4096
    network: str | None = None
    variables: Sequence[str] = ()
    variables_file: Path | None = None
    arguments: Sequence[str] = ()

    @property
    def published(self) -> dict[int, int]:
        """Ports of this machine by those of the container."""
        ports = {
            image.API_PORT: self.port,
            image.GRPC_PORT: self.grpc_port,
            image.HTTP_PORT: self.http_port,
            image.METRICS_PORT: self.metrics_port,
        }
        return {inside: outside for inside, outside in ports.items() if outside is not None}


def run_command(
    package: Package, options: Options, engine: Engine, restart: bool = True
) -> list[str]:
    """`docker run …`, word by word. UsageError and CanvasError for options that cannot work."""
    words = [engine.name, "run", "--detach", "--name", options.name]
    words += ["--restart", RESTART] if restart else []
    words += ["--stop-timeout", str(image.STOP_GRACE), *_hardening(options)]
    if package.needs_gpu:
        words += engine.gpu_options(options.gpus)
    words += _network(options)
    words += ["--volume", f"{_cache(options.cache)}:{image.CACHE}"]
    engines = options.engines or package.engines
    if engines is not None:
        words += ["--volume", f"{_folder(engines)}:{PACKAGE}/engines:ro"]
    for variable in options.variables:
        if not variable.partition("=")[0]:
            raise UsageError(f"--env {variable!r} has no name", "give --env NAME=VALUE")
        words += ["--env", variable]
    if options.variables_file is not None:
        if not options.variables_file.is_file():
            raise CanvasError(
                f"there is no file {options.variables_file}", "give --env-file a file of NAME=VALUE"
            )
        words += ["--env-file", str(options.variables_file)]
    words.append(package.tag)
    if options.arguments:
        words += [*image.COMMAND, *options.arguments]
    return words


def _hardening(options: Options) -> list[str]:
    words = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
    words += ["--security-opt", "no-new-privileges", "--pids-limit", str(options.pids)]
    words += ["--shm-size", options.shm_size]
    if options.memory is not None:
        words += ["--memory", options.memory]
    if options.cpus is not None:
        words += ["--cpus", f"{options.cpus:g}"]
    return words


def _network(options: Options) -> list[str]:
    words = [] if options.network is None else ["--network", options.network]
    if options.network in ("host", "none"):
        return words  # nothing is published there
    for inside, outside in options.published.items():
        words += ["--publish", f"{options.listen}:{outside}:{inside}"]
    return words


def _cache(cache: str) -> str:
    """A volume's name as it is, a folder in full. CanvasError for a folder that cannot be used."""
    if "/" not in cache and not cache.startswith("."):
        return cache
    folder = Path(cache).expanduser().resolve()
    if not folder.is_dir():
        raise CanvasError(
            f"the cache folder {folder} is not there",
            f"mkdir {folder} && chown {image.USER} {folder}, or give the name of a volume",
        )
    status = folder.stat()
    if not (status.st_mode & 0o002 or (status.st_uid == image.USER and status.st_mode & 0o200)):
        raise CanvasError(
            f"the container runs as user {image.USER}, who cannot write to {folder}",
            f"chown {image.USER} {folder}",
        )
    return str(folder)


def _folder(path: Path) -> Path:
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise CanvasError(
            f"there are no engines at {path}", "give the folder that `canvasrt build` wrote"
        )
    return path
