"""The command line of tritonserver, and its environment."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from canvasrt.containers.names import (
    EVIDENCE_VARIABLE,
    HEARTBEAT_VARIABLE,
    LEVEL_VARIABLE,
    REASON_VARIABLE,
    STOPPING_VARIABLE,
)
from canvasrt.containers.serve.gpus import environment_of
from canvasrt.containers.serve.installation import Installation
from canvasrt.containers.tensors import OWNER
from canvasrt.containers.triton.options import ModelOptions

UNLOAD_TIMEOUT = 3  # seconds to unload the models after requests in flight have finished
# Names of files in the scratch folder.
STOPPING, HEARTBEAT, REASON, EVIDENCE = "stopping", "heartbeat", "reason", "evidence"
_FILES = {
    STOPPING_VARIABLE: STOPPING,
    HEARTBEAT_VARIABLE: HEARTBEAT,
    REASON_VARIABLE: REASON,
    EVIDENCE_VARIABLE: EVIDENCE,
}
# Restricted endpoints: they change the server, or make it access shared memory. No caller needs them.
_CLOSED = "model-repository,shared-memory,logging,trace"
# The header that would permit access to these endpoints. Command lines cannot hold a secret, so this is a name that no
# client can send.
_NO_HEADER = "closed\r\n"


def triton_command(
    installation: Installation,
    folder: Path,
    repository: Path,
    run_name: str,
    addresses: Mapping[str, tuple[str, int]],
    gpus: int,
    ready_timeout: float,
    options: Sequence[str],
) -> list[str]:
    """Return the command line of a server.

    folder: its scratch folder. run_name: prefix of the names of its shared memory. addresses: host and port of its
    HTTP, gRPC and metrics servers; a host `unix:PATH` is a Unix socket. gpus: number of GPUs that it sees.
    ready_timeout: seconds for loading a model. options: further options.
    """
    command = [
        str(installation.binary),
        f"--model-repository={repository}",
        *(installation.prepare(folder) if installation.bundled else []),
        # The configurations are complete. Auto-completion would start every model's process twice.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={UNLOAD_TIMEOUT}",
        f"--backend-config=python,shm-region-prefix-name={run_name}",
        f"--backend-config=python,stub-timeout-seconds={math.ceil(ready_timeout)}",
        # Triton never copies to or from GPUs; the models do that themselves.
        "--pinned-memory-pool-byte-size=0",
    ]
    # `gpus` does not count the files /dev/nvidia*, because WSL has GPUs without such files. Triton numbers GPUs from 0.
    command += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(gpus)]
    for name, (host, port) in addresses.items():
        command += [f"--{name}-address={_address(name, host)}", f"--{name}-port={port}"]
    command.append(f"--http-header-forward-pattern=^{OWNER}$")  # used by the front end
    for option in ("http-restricted-api", "grpc-restricted-protocol"):
        command.append(f"--{option}={_CLOSED}:{_NO_HEADER}=closed")
    gpu_metrics = [] if Path("/dev/nvidiactl").exists() else ["--allow-gpu-metrics=false"]
    return [*command, *gpu_metrics, *options]


def _address(server: str, host: str) -> str:
    """Return an address in the form that one of Triton's servers takes. Its HTTP and metrics servers do not
    accept host names: given a host name, they listen nowhere."""
    if host.startswith("unix:"):
        return host
    if ":" in host:
        return f"[{host}]" if server == "grpc" else f"ipv6:{host}"
    return socket.gethostbyname(host)


def triton_environment(
    installation: Installation,
    folder: Path,
    model: ModelOptions,
    cache: Path | None,
    gpus: Sequence[str],
) -> dict[str, str]:
    """Return a server's environment. folder: its scratch folder. cache: canvasrt's cache folder, if not the default.
    gpus: UUIDs of the models' GPUs."""
    env = installation.environment() | model.to_environment() | environment_of(gpus)
    env[LEVEL_VARIABLE] = str(logging.root.level if logging.root.handlers else logging.INFO)
    if cache is not None:
        env["CANVASRT_CACHE"] = str(cache)
    return env | {variable: str(folder / file) for variable, file in _FILES.items()}
