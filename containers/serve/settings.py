"""The settings of `canvasrt serve`: options, NIM's environment variables, and their precedence."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from canvasrt.cache import user_folder
from canvasrt.containers.names import API_KEYS, EXIT_TIMEOUT, STALL_TIMEOUT
from canvasrt.containers.openai.options import LEVELS, FrontOptions
from canvasrt.containers.ports import Ports
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.defaults import MAX_SECONDS
from canvasrt.errors import CanvasError, UsageError
from canvasrt.option import CommandOption, flags_of, option, option_of, read_port, read_switch

PASSTHROUGH = "NIM_PASSTHROUGH_ARGS"
KEYS, KEYS_FILE = API_KEYS, "CANVASRT_API_KEYS_FILE"
TLS_MODES = ("disabled", "tls", "mtls")
# Endings of the variables that Kubernetes sets for a service. A service whose name begins with nim gets NIM_ variables.
# Kubernetes sets NAME_PORT to a service's address, such as tcp://10.0.0.1:80; users set it to a number.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)=|_PORT=\w+://")


def _read_tls_mode(text: str) -> str:
    if text.lower() not in TLS_MODES:
        raise ValueError(f"not one of {', '.join(TLS_MODES)}")
    return text.lower()


def _read_path(text: str) -> Path:
    if "://" in text:
        raise ValueError("not a path (nothing is downloaded here)")
    return Path(text)


def _file(help: str, variable: str) -> dict[str, Any]:
    return option(help, metavar="FILE", variable=variable, read=_read_path)


def _seconds(help: str, least: float) -> dict[str, Any]:
    return option(help, metavar="SECONDS", least=least)


@dataclass(frozen=True)
class Settings:
    """All options of `canvasrt serve`. `log` is a file, `-` for stderr, or None for the default of `log_file`."""

    # `bundle` is a positional argument.
    bundle: Path | None = field(default=None, metadata=_file("", "NIM_MODEL_PATH"))
    front: FrontOptions = field(default_factory=FrontOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    ports: Ports = field(default_factory=Ports)
    triton_host: str = field(
        default="127.0.0.1",
        metadata=option(
            "The address on which Triton's HTTP and gRPC APIs listen, without TLS.",
            metavar="ADDRESS",
        ),
    )
    triton_behind_proxy: bool = field(
        default=False,
        metadata=option(
            "Let Triton itself listen on its ports, because a proxy authenticates access to them; required for"
            " --triton-host with TLS."
        ),
    )
    profile: str | None = field(
        default=None,
        metadata=option(
            "The id or name of a serving profile; see `list-model-profiles`.",
            metavar="ID",
            shown="the best for this machine",
            variable="NIM_MODEL_PROFILE",
            read=str,
        ),
    )
    device: str | None = field(
        default=None,
        metadata=option(
            "The GPU, by its number or UUID in `nvidia-smi -L`.",
            metavar="GPU",
            shown="the first that fits",
        ),
    )
    devices: str | None = field(
        default=None,
        metadata=option(
            "`all`: run an instance of the model on every fitting GPU that has the same name as the first.",
            metavar="all",
            shown="one GPU",
        ),
    )
    cache: Path | None = field(
        default=None,
        metadata=option(
            "The folder for engines and kernels that the first start compiles.",
            metavar="DIR",
            variable="NIM_CACHE_PATH",
            read=_read_path,
        ),
    )
    ssl_mode: str | None = field(
        default=None,
        metadata=option(
            "TLS for the OpenAI API: disabled, tls or mtls.",
            metavar="MODE",
            shown="disabled",
            variable="NIM_SSL_MODE",
            read=_read_tls_mode,
        ),
    )
    ssl_cert: Path | None = field(
        default=None, metadata=_file("The server's certificate.", "NIM_SSL_CERTS_PATH")
    )
    ssl_key: Path | None = field(
        default=None, metadata=_file("The certificate's key.", "NIM_SSL_KEY_PATH")
    )
    ssl_ca: Path | None = field(
        default=None,
        metadata=_file(
            "The authority that signs callers' certificates, for mtls.", "NIM_SSL_CA_CERTS_PATH"
        ),
    )
    log: str | None = field(
        default=None,
        metadata=option(
            "The file for the servers' output; - for stderr.",
            metavar="FILE",
            shown="a file in the state folder",
        ),
    )
    verbose: bool = field(
        default=False, metadata=option("Copy the log to stderr.", flag="--verbose, -v")
    )
    ready_timeout: float | None = field(
        default=None,
        metadata=option(
            "Time limit for loading the engines.",
            metavar="SECONDS",
            least=0,
            most=MAX_SECONDS,
            shown="depends on their size",
        ),
    )
    exit_timeout: int = field(
        default=EXIT_TIMEOUT,
        metadata=_seconds("How long requests in flight may take at shutdown.", 0),
    )
    stall_timeout: float = field(
        default=STALL_TIMEOUT,
        metadata=_seconds(
            "Time limit for one pass, and for preparing one request; a server that exceeds it ends with exit"
            " code 4.",
            1,
        ),
    )
    dry_run: bool = field(
        default=False, metadata=option("Print what would be served, and where; start nothing.")
    )
    as_json: bool = False
    sockets: Path | None = None  # folder of Triton's Unix sockets; `run_server` sets it

    @property
    def log_file(self) -> Path | None:
        """The log file; None for stderr. By default, JSON logs go to stderr, and plain logs to `default_log`."""
        if self.log == "-" or (self.front.json_logs and self.log is None):
            return None
        return Path(self.log) if self.log else default_log(self.ports.http)

    @property
    def tls(self) -> dict[str, str] | None:
        """The TLS files; None without TLS."""
        files = {"certificate": self.ssl_cert, "key": self.ssl_key}
        if self.ssl_mode == "mtls":
            files["ca"] = self.ssl_ca
        on = self.ssl_mode in ("tls", "mtls")
        return {name: str(file) for name, file in files.items()} if on else None

    @property
    def triton_options(self) -> tuple[str, ...]:
        """The log level as tritonserver's options."""
        place = LEVELS.index(self.front.log_level)
        options = [] if place > 1 else ["--log-verbose=1"]
        options += ["--log-info=false"] if place > 2 else []
        return tuple(options + (["--log-warning=false"] if place > 3 else []))


def default_log(http_port: int) -> Path:
    """Return the default log file of a server on this port, in the user's state folder."""
    return user_folder("XDG_STATE_HOME", ".local/state") / f"triton-{http_port}.log"


_GROUPS = {"front": FrontOptions, "model": ModelOptions}
# The classes whose described fields become options of the command line.
OPTION_CLASSES = (FrontOptions, Ports, ModelOptions, Settings)
_OPTIONS: dict[str, CommandOption] = {
    each.name: of for kind in OPTION_CLASSES for each in fields(kind) if (of := option_of(each))
}
# Other names of ports in NIM's containers with Triton. NVIDIA's operator sets them.
_PORTS = {
    "NIM_HTTP_API_PORT": "port",
    "NIM_GRPC_API_PORT": "grpc_port",
    "NIM_TRITON_GRPC_PORT": "grpc_port",
    "NIM_TRITON_METRICS_PORT": "metrics_port",
}
_BY_VARIABLE = _PORTS | {of.variable: name for name, of in _OPTIONS.items() if of.variable}
# This variable is accepted but has no effect, because nothing is downloaded.
_NO_DOWNLOAD = "NIM_DISABLE_MODEL_DOWNLOAD"
VARIABLES = (*_BY_VARIABLE, _NO_DOWNLOAD, PASSTHROUGH)


def read_settings(
    command_line: Mapping[str, Any],
    passthrough: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings. The command line takes precedence over passthrough arguments, and these over the
    environment.

    Each mapping has options, keyed by name; an option that is None is absent. Raises UsageError for an invalid value.
    `check_settings` checks for contradictions.
    """
    environment = os.environ if environment is None else environment
    given = from_environment(environment)
    for level in (passthrough, command_line):
        given |= {name: _parsed(name, value) for name, value in level.items() if value is not None}
    ports = Ports(
        **{each.name: given.pop(f"{each.name}_port", each.default) for each in fields(Ports)}
    )
    groups = {
        name: kind(
            **{each.name: given.pop(each.name) for each in fields(kind) if each.name in given}
        )
        for name, kind in _GROUPS.items()
    }
    settings = Settings(**given, **groups, ports=ports)
    return replace(settings, front=replace(settings.front, keys=api_keys(environment)))


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that NIM's variables set, keyed by name.

    Raises UsageError for an invalid value, and for a NIM variable that is not supported, since ignoring it would be a
    surprise.
    """
    found: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        ours = name.startswith("NIM_") or name in _BY_VARIABLE
        if not ours or not text.strip() or name == PASSTHROUGH:
            continue
        if _SERVICE_LINK.search(f"{name}={text}"):
            continue
        if name == _NO_DOWNLOAD:
            _read(name, read_switch, text)
        elif name in _BY_VARIABLE:
            option_name = _BY_VARIABLE[name]
            read = read_port if name in _PORTS else _OPTIONS[option_name].read
            found[option_name] = _read(name, read or str, text)
        else:
            raise UsageError(
                f"{name} is not supported",
                f"unset it; the supported NIM variables are {', '.join(VARIABLES)}",
            )
    return found


def _parsed(name: str, value: Any) -> Any:
    """Return an option's value. Text from the command line is parsed like an environment variable's."""
    of = _OPTIONS.get(name)
    if of is None or of.read is None or not isinstance(value, str):
        return value
    return _read(flags_of(name, of)[0].partition("/")[0], of.read, value)


def _read(label: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text.strip())
    except ValueError as error:
        raise UsageError(f"{label} is {text!r}: {error}", f"set {label} to another value") from None


def api_keys(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the accepted API keys. If there are none, callers need no key."""
    text, file = environment.get(KEYS), environment.get(KEYS_FILE)
    if text is not None and file is not None:
        raise UsageError(f"{KEYS} and {KEYS_FILE} are both set", "unset one of them")
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CanvasError(
                f"cannot read the API keys in {file}: {error}",
                f"set {KEYS_FILE} to a file with one key per line",
            ) from error
    else:
        lines = (text or "").split(",")
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys and (text is not None or file is not None):
        # Refuse to start, because otherwise a mistake would admit all callers.
        raise UsageError(
            f"{KEYS if file is None else KEYS_FILE} is set but contains no key",
            "put a key in it, or unset it to accept every caller",
        )
    return keys
