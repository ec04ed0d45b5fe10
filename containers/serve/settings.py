"""How `canvasrt serve` is set up: its options, NIM's environment variables, and which of them wins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from canvasrt.containers.ports import API_PORT, Ports
from canvasrt.containers.serve.server import EXIT_TIMEOUT, READY_TIMEOUT
from canvasrt.errors import CanvasError, UsageError

PASSTHROUGH = "NIM_PASSTHROUGH_ARGS"
KEYS, KEYS_FILE = "CANVASRT_API_KEYS", "CANVASRT_API_KEYS_FILE"
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TLS_MODES = ("disabled", "tls", "mtls")
# What Kubernetes sets for a service whose name begins with nim.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP)\w*)?)$")


@dataclass(frozen=True)
class Settings:
    """Everything that `canvasrt serve` can be told. `log` is a file, `-` for stderr, or None."""

    bundle: Path | None = None
    host: str = "127.0.0.1"
    port: int = API_PORT
    health_port: int | None = None
    ports: Ports = field(default_factory=Ports)
    names: tuple[str, ...] = ("canvasrt",)
    keys: tuple[str, ...] = field(default=(), repr=False)
    max_model_len: int | None = None
    profile: str | None = None
    cache: Path | None = None
    ssl_mode: str = "disabled"
    ssl_cert: Path | None = None
    ssl_key: Path | None = None
    ssl_ca: Path | None = None
    log: str | None = None
    log_level: str = "INFO"
    json_logs: bool = False
    verbose: bool = False
    ready_timeout: float = READY_TIMEOUT
    exit_timeout: int = EXIT_TIMEOUT
    threads: int | None = None
    share_passes: bool = False
    dry_run: bool = False
    as_json: bool = False

    @property
    def log_file(self) -> Path | None:
        """Where the servers' output goes; None for stderr."""
        if self.log == "-" or (self.json_logs and self.log is None):
            return None
        return Path(self.log) if self.log else default_log(self.ports.http)

    @property
    def tls(self) -> dict[str, str] | None:
        """The files of TLS, where it is on. CanvasError for one that is missing."""
        if self.ssl_mode == "disabled":
            return None
        files = {"certificate": ("--ssl-cert", self.ssl_cert), "key": ("--ssl-key", self.ssl_key)}
        if self.ssl_mode == "mtls":
            files["ca"] = ("--ssl-ca", self.ssl_ca)
        return {name: _readable(*given, self.ssl_mode) for name, given in files.items()}

    @property
    def triton_options(self) -> tuple[str, ...]:
        """The log level in tritonserver's terms."""
        place = LEVELS.index(self.log_level)
        options = [] if place > 1 else ["--log-verbose=1"]
        options += ["--log-info=false"] if place > 2 else []
        return tuple(options + (["--log-warning=false"] if place > 3 else []))

    @property
    def python_level(self) -> str:
        """The log level in Python's terms, which have no TRACE."""
        return "DEBUG" if self.log_level == "TRACE" else self.log_level


def default_log(http_port: int) -> Path:
    """The log of the server on this port, in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "canvasrt" / f"triton-{http_port}.log"


def resolve(
    command_line: Mapping[str, Any],
    passthrough: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings: what the command line says, else the passthrough arguments, else the environment,
    else the defaults. None stands for what was not given. UsageError names what cannot be used."""
    environment = os.environ if environment is None else environment
    known = {each.name for each in fields(Settings)}
    given = from_environment(environment)
    for level in (passthrough, command_line):
        given |= {name: value for name, value in level.items() if value is not None}
    if "log_level" in given:
        given["log_level"] = given["log_level"].upper()
    defaults = Ports()
    ports = Ports(
        *(given.pop(f"{n}_port", getattr(defaults, n)) for n in ("http", "grpc", "metrics"))
    )
    assert not set(given) - known, set(given) - known
    settings = Settings(**given, ports=ports, keys=api_keys(environment))
    if settings.log_level not in LEVELS:
        raise UsageError(
            f"there is no log level {settings.log_level!r}", f"the levels are {', '.join(LEVELS)}"
        )
    if settings.json_logs and settings.log_file is not None:
        raise UsageError("--json-logs goes to stderr, and --log names a file", "leave one out")
    if settings.ssl_mode not in TLS_MODES:
        raise UsageError(
            f"there is no TLS mode {settings.ssl_mode!r}", f"the modes are {', '.join(TLS_MODES)}"
        )
    return settings


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """NIM's variables as settings by name. UsageError for a value that cannot be used, and for a
    variable of NIM's that has no counterpart here: nothing is ignored."""
    found: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if not name.startswith("NIM_") or not text.strip() or name == PASSTHROUGH:
            continue
        if name not in _VARIABLES:
            if _SERVICE_LINK.search(name):
                continue
            raise UsageError(
                f"{name} is not supported",
                f"unset it; of NIM's variables these are: {', '.join([*_VARIABLES, PASSTHROUGH])}",
            )
        setting, read = _VARIABLES[name]
        try:
            value = read(text.strip())
        except ValueError as error:
            raise UsageError(
                f"{name} is {text!r}: {error}", f"set {name} to another value, or unset it"
            ) from None
        if setting:
            found[setting] = value
    return found


def api_keys(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that callers must show, one of them each; none lets everybody in."""
    text, file = environment.get(KEYS), environment.get(KEYS_FILE)
    if text is not None and file is not None:
        raise UsageError(f"{KEYS} and {KEYS_FILE} are both set", "unset one of them")
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CanvasError(
                f"the API keys in {file} cannot be read: {error}",
                f"name a file with one key a line in {KEYS_FILE}",
            ) from error
    else:
        lines = (text or "").split(",")
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys and (text is not None or file is not None):
        # Rather no server than one that is open by mistake.
        raise UsageError(
            f"{KEYS if file is None else KEYS_FILE} is set and holds no key",
            "put a key in it, or unset it to let everybody in",
        )
    return keys


def _readable(option: str, file: Path | None, mode: str) -> str:
    if file is None:
        raise UsageError(f"TLS ({mode}) needs {option}", f"give {option} FILE")
    if not os.access(file, os.R_OK) or not file.is_file():
        raise CanvasError(f"{option}: {file} cannot be read", "check the path and its permissions")
    return str(file)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise ValueError("not a port")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("not a number above 0")
    return int(text)


def _switch(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError("neither 0 nor 1")
    return words[text.lower()]


def names_of(text: str) -> tuple[str, ...]:
    """`a, b` → the names that one model is served under."""
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not names:
        raise ValueError("holds no name")
    return names


def _level(text: str) -> str:
    # DEFAULT is NIM's own word for the usual level.
    level = "INFO" if text.upper() == "DEFAULT" else text.upper()
    if level not in LEVELS:
        raise ValueError(f"none of {', '.join(LEVELS)}")
    return level


def _tls_mode(text: str) -> str:
    if text.lower() not in TLS_MODES:
        raise ValueError(f"none of {', '.join(TLS_MODES)}")
    return text.lower()


def _path(text: str) -> Path:
    if "://" in text:
        raise ValueError("not a folder: nothing is downloaded here")
    return Path(text)


_Read = Callable[[str], Any]
# Variable → the setting that it stands for, and how it is read.
_VARIABLES: dict[str, tuple[str, _Read]] = {
    "NIM_MODEL_PROFILE": ("profile", str),
    "NIM_MODEL_PATH": ("bundle", _path),
    "NIM_CACHE_PATH": ("cache", _path),
    "NIM_SERVER_PORT": ("port", _port),
    "NIM_HEALTH_PORT": ("health_port", _port),
    "NIM_LOG_LEVEL": ("log_level", _level),
    "NIM_JSONL_LOGGING": ("json_logs", _switch),
    "NIM_SERVED_MODEL_NAME": ("names", names_of),
    "NIM_MAX_MODEL_LEN": ("max_model_len", _count),
    # Nothing is ever downloaded: both values are true.
    "NIM_DISABLE_MODEL_DOWNLOAD": ("", _switch),
    "NIM_SSL_MODE": ("ssl_mode", _tls_mode),
    "NIM_SSL_CERTS_PATH": ("ssl_cert", _path),
    "NIM_SSL_KEY_PATH": ("ssl_key", _path),
    "NIM_SSL_CA_CERTS_PATH": ("ssl_ca", _path),
}
VARIABLES = (*_VARIABLES, PASSTHROUGH)
