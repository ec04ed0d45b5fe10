"""The options of `canvasrt deploy`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from canvasrt.containers.names import (
    API_PORT,
    CONTAINER_VARIABLES,
    GRPC_PORT,
    HTTP_PORT,
    LOOPBACK,
)
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import UsageError
from canvasrt.option import option, option_of, port_option

DEPLOY_TIMEOUT = 3600.0  # seconds allowed for a start, unless the image allows more
_SIZE = r"\d+[bkmgBKMG]?"

# Options that `deploy` passes on to the server → the server's environment variable.
SERVER_CLASSES = (FrontOptions, ModelOptions)
SERVER_VARIABLES = {
    each.name: of.variable
    for kind in SERVER_CLASSES
    for each in fields(kind)
    if (of := option_of(each)) and of.variable in CONTAINER_VARIABLES
}


@dataclass(frozen=True)
class DeployOptions:
    """The options of `canvasrt deploy`. Raises UsageError for a value that docker would not accept."""

    name: str = field(default="canvasrt", metadata=option("The container's name.", metavar="NAME"))
    listen: str = field(
        default="127.0.0.1",
        metadata=option("The address to listen on; 0.0.0.0 for all.", metavar="ADDRESS"),
    )
    port: int = field(
        default=API_PORT,
        metadata=port_option("Port of the OpenAI API, health and metrics.", least=1),
    )
    grpc_port: int | None = field(
        default=None,
        metadata=port_option(
            "Port of Triton's gRPC API; not together with TLS.",
            least=1,
            shown="closed",
        ),
    )
    http_port: int | None = field(
        default=None,
        metadata=port_option(
            "Port of Triton's HTTP API; not together with TLS.",
            least=1,
            shown="closed",
        ),
    )
    gpus: str = field(
        default="all",
        metadata=option("Which GPUs to use; only for GPU targets.", metavar="all|N[,N...]"),
    )
    cache: str = field(
        default="canvasrt-cache",
        metadata=option(
            "Where to keep engines that are built at the first start.", metavar="VOLUME|DIR"
        ),
    )
    engines: Path | None = field(
        default=None,
        metadata=option("The engines to mount, for an image without engines.", metavar="DIR"),
    )
    shm_size: str = field(
        default="1g",
        metadata=option("Size of the shared memory, for Triton's tensors.", metavar="SIZE"),
    )
    memory: str | None = field(default=None, metadata=option("Memory limit.", metavar="SIZE"))
    cpus: float | None = field(default=None, metadata=option("CPU limit.", metavar="N"))
    network: str | None = field(
        default=None, metadata=option('Docker network to join, or "host".', metavar="NAME")
    )
    variables: Sequence[str] = field(
        default=(),
        metadata=option(
            "An environment variable; without =VALUE, its value in this shell. May be given several times.",
            flag="--env",
            metavar="NAME[=VALUE]",
        ),
    )
    variables_file: Path | None = field(
        default=None,
        metadata=option(
            "A file of environment variables, for example with API keys.",
            flag="--env-file",
            metavar="FILE",
        ),
    )

    server: Mapping[str, str] = field(default_factory=dict)  # variable → value

    @property
    def published(self) -> dict[int, int]:
        """The container's ports → this machine's ports."""
        ports = {API_PORT: self.port, GRPC_PORT: self.grpc_port, HTTP_PORT: self.http_port}
        return {inside: outside for inside, outside in ports.items() if outside is not None}

    @property
    def own_ports(self) -> dict[int, int]:
        """Default port → actual port, for a container on the host's network."""
        return {
            API_PORT: self.port,
            GRPC_PORT: self.grpc_port or GRPC_PORT,
            HTTP_PORT: self.http_port or HTTP_PORT,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The server's environment variables: `server`, plus defaults if only this machine can call the server. Leaves
        out defaults that `variables_file` sets, because they would override the file."""
        file = self.variables_file
        lines = file.read_text("utf-8", "replace").splitlines() if file and file.is_file() else ()
        given = {line.partition("=")[0].strip() for line in lines}
        local = self.listen in LOOPBACK
        own = {
            n: make(self.name)
            for n, make in CONTAINER_VARIABLES.items()
            if local and n not in given
        }
        return {name: text for name, text in {**own, **self.server}.items() if text}

    @property
    def opens_triton(self) -> bool:
        """Whether callers outside the container can reach Triton's own ports."""
        inside = self.network in ("host", "none")
        return not inside and (self.grpc_port, self.http_port) != (None, None)

    def __post_init__(self) -> None:
        checks = (
            ("--name", self.name, r"[a-zA-Z0-9][\w.-]+", "letters, digits, _, . and -"),
            ("--gpus", self.gpus, r"all|\d+(,\d+)*", "all, or numbers separated by commas"),
            ("--shm-size", self.shm_size, _SIZE, "a size such as 512m or 1g"),
            ("--memory", self.memory, _SIZE, "a size such as 512m or 1g"),
        )
        for flag, value, pattern, wanted in checks:
            if value is not None and not re.fullmatch(pattern, value):
                raise UsageError(f"{flag} is {value!r}", f"give {wanted}")
        if self.cpus is not None and not self.cpus > 0:
            raise UsageError(f"--cpus is {self.cpus:g}", "give a number above 0")
        if self.network == "host" and self.listen not in (LOOPBACK[0], "localhost", "0.0.0.0"):  # noqa: S104
            raise UsageError(
                f"--listen is {self.listen}, but with --network host the health check calls {LOOPBACK[0]}",
                f"give {LOOPBACK[0]}, or 0.0.0.0 for all addresses",
            )
        for variable in self.variables:
            if not variable.partition("=")[0]:
                raise UsageError(f"--env {variable!r} has no name", "give --env NAME=VALUE")
