"""Options of `canvasrt serve` that another process gets whole: the models inside Triton, and the
OpenAI front end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from canvasrt.containers.names import API_PORT
from canvasrt.defaults import PREFIX_CACHE
from canvasrt.errors import CanvasError
from canvasrt.option import option, port_option

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def limit_option(help: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a field that bounds what callers may ask for. None stands for no limit."""
    return option(help, **{"metavar": "N", "least": 1, "shown": "none"} | more)


# In seconds: for loading tens of gigabytes, for requests in flight at shutdown, and for one pass, of which the first of
# a shape may compile kernels.
READY_TIMEOUT, EXIT_TIMEOUT, STALL_TIMEOUT = 600.0, 10, 300.0


# What the supervisor tells the front end of the server behind it.
ServerPhase = Literal["starting", "building", "loading", "serving", "failed", "stopping"]


def read_port(text: str) -> int:
    """Return a port number."""
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise ValueError("not a port number")
    return int(text)


def read_count(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("not a whole number above 0")
    return int(text)


def read_switch(text: str) -> bool:
    """Return whether a switch is on."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError("not 0 or 1")
    return words[text.lower()]


def read_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once."""
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not names:
        raise ValueError("contains no name")
    return names


def read_level(text: str) -> str:
    """Return a log level."""
    # DEFAULT is NIM's name for the usual level.
    level = "INFO" if text.upper() == "DEFAULT" else text.upper()
    if level not in LEVELS:
        raise ValueError(f"not one of {', '.join(LEVELS)}")
    return level


@dataclass(frozen=True)
class ModelOptions:
    """Options of the models inside Triton, which read them from their environment."""

    threads: int | None = field(
        default=None, metadata=option("Number of CPU threads.", least=1, shown="every core")
    )
    max_model_len: int | None = field(
        default=None,
        metadata=option(
            "Maximum tokens per request, prompt plus answer.",
            metavar="TOKENS",
            least=1,
            shown="the engines'",
            variable="NIM_MAX_MODEL_LEN",
            read=read_count,
        ),
    )
    share_passes: bool = field(
        default=False,
        metadata=option(
            "On a GPU, let requests share passes, which then always have room for a full batch: higher throughput,"
            " but a lone request is slower."
        ),
    )
    prefix_cache: int = field(
        default=PREFIX_CACHE,
        metadata=option(
            "Memory for the beginnings that prompts share, on the GPU if there is one; 0 for none.",
            metavar="MIB",
            least=0,
        ),
    )
    max_steps: int | None = field(
        default=None,
        metadata=limit_option("Maximum denoising steps per block that a request may ask for."),
    )
    max_passes: int | None = field(
        default=None,
        metadata=limit_option(
            "Maximum denoising passes of a request: blocks times steps times answers."
        ),
    )
    max_queue_tokens: int = field(
        default=1 << 22,
        metadata=limit_option("Maximum tokens of all requests that run or wait.", shown=None),
    )
    request_timeout: int | None = field(
        default=None,
        metadata=limit_option(
            "How long one request may take, its wait included.", metavar="SECONDS"
        ),
    )

    def to_environment(self) -> dict[str, str]:
        """Return the variables that say this. An option that is None is left to the environment."""
        return {
            _variable(name): json.dumps(value)
            for name, value in asdict(self).items()
            if value is not None
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ModelOptions:
        """Return what the variables say. CanvasError for a value of the wrong type."""
        types = get_type_hints(cls)
        found = {}
        for each in fields(cls):
            text = environment.get(_variable(each.name), "")
            if not text:
                continue
            try:
                found[each.name] = json.loads(text)
            except ValueError:
                found[each.name] = text
            wanted = "true or false" if types[each.name] is bool else "a whole number"
            is_bool = isinstance(found[each.name], bool)
            # To Python, true is a whole number too.
            if is_bool != (types[each.name] is bool) or not isinstance(
                found[each.name], types[each.name]
            ):
                raise CanvasError(
                    f"{_variable(each.name)} is {text!r}", f"set it to {wanted}, or unset it"
                )
        return cls(**found)


@dataclass(frozen=True)
class FrontOptions:
    """Where the OpenAI front end listens, and what it says about the model. Port 0 takes a free
    one."""

    host: str = field(
        default="127.0.0.1",
        metadata=option("The address to listen on; 0.0.0.0 for all.", metavar="ADDRESS"),
    )
    # Host headers that a server without keys answers to; none stands for loopback's names on
    # loopback, and for any elsewhere.
    hosts: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "The names under which a server without API keys answers.",
            flag="--allowed-hosts",
            metavar="HOST[,HOST...]",
            shown="loopback's, on loopback",
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
    tls: dict[str, str] | None = None  # certificate, key and, for mutual TLS, ca
    about: dict[str, Any] = field(default_factory=dict)  # for /v1/metadata
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
        metadata=limit_option("Maximum number of answers that one API key may wait for at once."),
    )
    max_connections: int = field(
        default=1024,
        metadata=limit_option("Maximum number of connections to the OpenAI API.", shown=None),
    )
    max_body: int = 16 * 2**20  # bytes; a context of 256k tokens, as ids, takes 2 MB

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FrontOptions:
        """Return the inverse of `asdict`, whose tuples are lists in JSON."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class FrontSettings:
    """What the supervisor hands to the front end's process. Sockets are inherited file descriptors."""

    socket: int
    grpc: str  # host:port
    metrics: str  # a URL
    options: FrontOptions
    health_socket: int | None = None
    heartbeat: int | None = None

    def to_line(self) -> bytes:
        """Return the settings as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> FrontSettings:
        """Return the inverse of `to_line`."""
        data = json.loads(line)
        return cls(**{**data, "options": FrontOptions.from_json(data["options"])})


def _variable(name: str) -> str:
    return f"CANVASRT_{name.upper()}"
