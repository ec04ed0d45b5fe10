"""The settings of an image, for both our image writer and the Dockerfile."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import canvasrt
from canvasrt.bundle import Manifest
from canvasrt.containers.names import (
    API_PORT,
    ARCHITECTURES,
    CHECK_TIMEOUT,
    FAILED_CHECKS,
    GRPC_PORT,
    HTTP_PORT,
    METRICS_PORT,
    ROOT,
)
from canvasrt.containers.package.sizes import sizes_of, target_of
from canvasrt.errors import UsageError
from canvasrt.hashes import canonical
from canvasrt.targets import find_target

CACHE = "/opt/nim/.cache"
USER = 1000
PORTS = (API_PORT, GRPC_PORT, METRICS_PORT, HTTP_PORT)
# Seconds to finish requests in flight at shutdown, and seconds that `docker stop` must wait.
CONTAINER_EXIT_TIMEOUT = 30
STOP_GRACE = 45
# Default arguments of the container. They do not name the package's folder, because an argument would override
# NIM_MODEL_PATH.
COMMAND = (
    "serve",
    "--host",
    "0.0.0.0",
    "--log",
    "-",
    "--exit-timeout",
    str(CONTAINER_EXIT_TIMEOUT),
)
# The program. Its arguments are COMMAND, unless `docker run` overrides them.
ENTRYPOINT = (f"{ROOT}/venv/bin/python3", "-m", "canvasrt")
# The command of the health check.
PROBE = (f"{ROOT}/venv/bin/python3", "-m", "canvasrt.containers.serve.probe")
# The health check allows time to start this many GPUs, since a container's number of GPUs is not known beforehand.
# That is safe, because the server gives up a start that hangs.
_MOST_GPUS = 8
_SECOND = 10**9  # nanoseconds, as in an image's configuration


def created() -> str:
    """Return the image's time of creation: SOURCE_DATE_EPOCH, or the Unix epoch if that is not set."""
    text = os.environ.get("SOURCE_DATE_EPOCH") or "0"
    try:
        return datetime.fromtimestamp(int(text), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {text!r}", "set it to seconds since 1970, or unset it"
        ) from None


@dataclass(frozen=True)
class Health:
    """The health check's settings, in seconds. A check makes at most two calls. The start period covers loading
    and, at the first start, building engines or compiling kernels."""

    interval: int = 10
    timeout: int = 2 * CHECK_TIMEOUT + 4
    start_period: int = 3600
    retries: int = FAILED_CHECKS


@dataclass(frozen=True)
class ImageSettings:
    """The settings of one package's image."""

    labels: Mapping[str, str]
    gpu: bool
    health: Health = field(default_factory=Health)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables. `$PATH` is replaced by the base image's PATH."""
        variables = {
            "PATH": f"{ROOT}/venv/bin:$PATH",
            "HOME": "/tmp",  # the only writable folder under a read-only root
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "ORT_DISABLE_TELEMETRY": "1",
            "NIM_CACHE_PATH": CACHE,
        }
        if self.gpu:
            variables |= {
                # The driver's cache of compiled kernels: up to 1 GiB, which would fill /tmp.
                "CUDA_CACHE_PATH": f"{CACHE}/cuda",
                "NVIDIA_VISIBLE_DEVICES": "all",
                "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
            }
        return variables

    def to_config(self) -> dict[str, Any]:
        """Return the settings in the format of an image's configuration."""
        health = self.health
        return {
            "User": f"{USER}:{USER}",
            "WorkingDir": ROOT,
            "Env": self.environment,
            "Labels": dict(self.labels),
            "ExposedPorts": {f"{port}/tcp": {} for port in PORTS},
            "Entrypoint": list(ENTRYPOINT),
            "Cmd": list(COMMAND),
            "StopSignal": "SIGTERM",
            "Healthcheck": {
                "Test": ["CMD", *PROBE],
                "Interval": health.interval * _SECOND,
                "Timeout": health.timeout * _SECOND,
                "StartPeriod": health.start_period * _SECOND,
                "Retries": health.retries,
            },
        }


def settings_for(manifests: Sequence[Manifest]) -> ImageSettings:
    """Return the settings of an image that contains these engines or graphs."""
    labels = {
        "org.opencontainers.image.title": "canvasrt",
        "org.opencontainers.image.description": "DiffusionGemma as compiled engines behind Triton",
        "org.opencontainers.image.version": canvasrt.__version__,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "canvasrt.target": ",".join(target_name(each) for each in manifests),
        "canvasrt.precision": ",".join(
            str(each.options.get("precision", "")) for each in manifests
        ),
        "canvasrt.checkpoint": ",".join(dict.fromkeys(map(checkpoint_hash, manifests))),
        "canvasrt.engines": ",".join(each.digest for each in manifests),
    }
    targets = [target_of(each) for each in manifests]
    gpu = any(each.capability is not None for each in targets)
    sizes = [sizes_of(*each) for each in zip(manifests, targets, strict=True)]
    startup = max(each.startup + each.further * (_MOST_GPUS - 1) for each in sizes)
    return ImageSettings(labels, gpu, Health(start_period=startup))


def target_name(manifest: Manifest) -> str:
    """Return the name of the engines' target; `graphs` for graphs, whose engines are built where they run."""
    return manifest.target["name"] if manifest.target else "graphs"


def checkpoint_hash(manifest: Manifest) -> str:
    """Return an identifier of the checkpoint: a hash of its files' hashes; if they are unknown, the graphs' digest."""
    source = manifest.made_from.get("source", manifest.made_from)
    if set(source) == {"kind", "digest"}:
        return f"sha256:{source['digest']}"
    return "sha256:" + hashlib.sha256(canonical(source).encode()).hexdigest()


def architecture_of(manifests: Sequence[Manifest]) -> str | None:
    """Return `amd64` or `arm64`; None for targets that run on both."""
    hosts = {find_target(each.target["name"]).host for each in manifests if each.target} - {"any"}
    return None if len(hosts) != 1 else ARCHITECTURES[hosts.pop()]
