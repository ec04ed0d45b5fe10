"""The front end's options of `canvasrt serve`, and the settings of its process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from canvasrt.containers.names import ALLOWED_HOSTS, API_PORT
from canvasrt.errors import CanvasError
from canvasrt.option import limit_option, option, port_option, read_names, read_port, read_switch

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# The server's phases, as the supervisor reports them.
ServerPhase = Literal["starting", "building", "loading", "serving", "failed", "stopping"]


def read_level(text: str) -> str:
    """Return the log level that `text` names. Raises ValueError if it names none."""
    # DEFAULT is NIM's name for the usual level.
    level = "INFO" if text.upper() == "DEFAULT" else text.upper()
    if level not in LEVELS:
        raise ValueError(f"not one of {', '.join(LEVELS)}")
    return level


@dataclass(frozen=True)
class FrontOptions:
    """The OpenAI front end's addresses, limits and model names. Port 0 selects a free port."""

    host: str = field(
        default="127.0.0.1",
        metadata=option("Address to listen on; 0.0.0.0 for all interfaces.", metavar="ADDRESS"),
    )
    # Host headers that a server without keys accepts. If there are none, a server on loopback accepts loopback names,
    # and any other server accepts all names.
    hosts: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Host names that a server without API keys accepts; * for any.",
            flag="--allowed-hosts",
            metavar="HOST[,HOST...]",
            shown="localhost and 127.0.0.1 when it listens on loopback",
            variable=ALLOWED_HOSTS,
            read=read_names,
        ),
    )
    port: int = field(
        default=API_PORT,
        metadata=port_option(
            "Port of the OpenAI API; 0 takes a free one.",
            variable="NIM_SERVER_PORT",
            read=read_port,
        ),
    )
    health_port: int | None = field(
        default=None,
        metadata=port_option(
            "A second port, with only health routes.", variable="NIM_HEALTH_PORT", read=read_port
        ),
    )
    names: tuple[str, ...] = field(
        default=("canvasrt",),
        metadata=option(
            "The model's names in the OpenAI API.",
            flag="--served-model-name",
            metavar="NAME[,NAME...]",
            variable="NIM_SERVED_MODEL_NAME",
            read=read_names,
        ),
    )
    log_level: str = field(
        default="INFO",
        metadata=option(
            "TRACE, DEBUG, INFO, WARNING, ERROR or CRITICAL.",
            metavar="LEVEL",
            variable="NIM_LOG_LEVEL",
            read=read_level,
        ),
    )
    json_logs: bool = field(
        default=False,
        metadata=option(
            "Log to stderr, one JSON object per line.",
            flag="--json-logs/--text-logs",
            variable="NIM_JSONL_LOGGING",
            read=read_switch,
        ),
    )
    keys: tuple[str, ...] = field(default=(), repr=False)
    tls: dict[str, str] | None = None  # paths of `certificate`, `key` and, for mutual TLS, `ca`
    about: dict[str, Any] = field(default_factory=dict)  # for /v1/metadata and /v1/manifest
    origins: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Origins whose web pages may call the OpenAI API (CORS); * for any.",
            flag="--allowed-origins",
            metavar="ORIGIN[,ORIGIN...]",
            shown="none",
            read=read_names,
        ),
    )
    lenient: bool = field(
        default=False,
        metadata=option(
            "Ignore unsupported parameters, with a warning in the reply, instead of refusing them."
        ),
    )
    strict: bool = field(
        default=False,
        metadata=option("Refuse unknown parameters, instead of ignoring them with a warning."),
    )
    allow_remote_images: bool = field(
        default=False,
        metadata=option(
            "Fetch images that requests give by URL, from public addresses only. Without it, only data URLs work."
        ),
    )
    max_n: int = field(
        default=128, metadata=limit_option("Maximum number of answers per prompt.", shown=None)
    )
    max_key_requests: int | None = field(
        default=None,
        metadata=limit_option("Maximum number of concurrent answers per API key."),
    )
    max_connections: int = field(
        default=1024,
        metadata=limit_option("Maximum number of connections to the OpenAI API.", shown=None),
    )
    max_body: int = 16 * 2**20  # bytes; 256k token ids take about 2 MB

    def __post_init__(self) -> None:
        if self.lenient and self.strict:
            raise CanvasError("--lenient and --strict contradict each other", "give one of them")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FrontOptions:
        """Return the options that `asdict` turned into `data`. JSON's lists become tuples again."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class FrontSettings:
    """The settings that the supervisor hands to the front end's process. Sockets are given as file descriptors, which
    the process inherits."""

    socket: int
    grpc: str  # address of Triton's gRPC server
    metrics: str  # a URL
    options: FrontOptions
    health_socket: int | None = None
    heartbeat: int | None = None
    request_timeout: int | None = None  # seconds
    # Prefix of callers' names. It proves to the models that the front end wrote the names.
    caller_secret: str = ""
    triton_socket: int | None = None  # the front end offers Triton's HTTP API on this socket
    triton_host: str = ""  # the host of `triton_socket`
    triton_path: str = ""  # path of the Unix socket on which Triton itself offers the HTTP API
    grpc_address: str = ""  # the front end offers Triton's gRPC API at this address

    def to_line(self) -> bytes:
        """Return the settings as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> FrontSettings:
        """Return the settings that `to_line` wrote to `line`."""
        data = json.loads(line)
        return cls(**{**data, "options": FrontOptions.from_json(data["options"])})
