"""Options of `canvasrt serve` that another process gets whole: the models inside Triton, and the
OpenAI front end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_type_hints

from canvasrt.containers.names import API_PORT
from canvasrt.defaults import PREFIX_CACHE
from canvasrt.errors import CanvasError

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def nim(variable: str, read: Callable[[str], Any] = str, flag: str = "") -> dict[str, Any]:
    """Return the metadata of a field that a NIM environment variable can set.

    `read` parses its text, and that of the command line's `flag`; ValueError says what is wrong
    with it.
    """
    return {"variable": variable, "read": read, "flag": flag}


def option(read: Callable[[str], Any], flag: str) -> dict[str, Any]:
    """Return the metadata of a field that only the command line sets; see `nim`."""
    return {"read": read, "flag": flag}


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

    threads: int | None = None  # CPU threads; None for every core
    max_model_len: int | None = field(default=None, metadata=nim("NIM_MAX_MODEL_LEN", read_count))
    share_passes: bool = False
    prefix_cache: int = PREFIX_CACHE  # MiB
    # What one caller may ask for; None stands for no limit.
    max_steps: int | None = None  # denoising steps per block
    max_passes: int | None = None  # denoising passes of one request, all of its answers together
    max_queue_tokens: int = 1 << 22  # of all requests that run or wait
    request_timeout: int | None = None  # seconds

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

    host: str = "127.0.0.1"
    port: int = field(default=API_PORT, metadata=nim("NIM_SERVER_PORT", read_port))
    health_port: int | None = field(default=None, metadata=nim("NIM_HEALTH_PORT", read_port))
    names: tuple[str, ...] = field(
        default=("canvasrt",),
        metadata=nim("NIM_SERVED_MODEL_NAME", read_names, "--served-model-name"),
    )
    log_level: str = field(default="INFO", metadata=nim("NIM_LOG_LEVEL", read_level))
    json_logs: bool = field(default=False, metadata=nim("NIM_JSONL_LOGGING", read_switch))
    keys: tuple[str, ...] = field(default=(), repr=False)
    # Host headers that a server without keys answers to; none stands for loopback's names on
    # loopback, and for any elsewhere.
    hosts: tuple[str, ...] = field(default=(), metadata=option(read_names, "--allowed-hosts"))
    tls: dict[str, str] | None = None  # certificate, key and, for mutual TLS, ca
    about: dict[str, Any] = field(default_factory=dict)  # for /v1/metadata
    # Origins of web pages that may call the API; * for any.
    origins: tuple[str, ...] = field(default=(), metadata=option(read_names, "--allowed-origins"))
    lenient: bool = False  # leave out parameters that are not supported, with a warning
    allow_remote_images: bool = False  # fetch images from public addresses
    max_n: int = 128  # answers to one request
    max_key_requests: int | None = None  # of one API key at once
    max_connections: int = 1024
    max_body: int = 16 * 2**20  # bytes; a context of 256k tokens, as ids, takes 2 MB

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FrontOptions:
        """Return the inverse of `asdict`, whose tuples are lists in JSON."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)


def _variable(name: str) -> str:
    return f"CANVASRT_{name.upper()}"
