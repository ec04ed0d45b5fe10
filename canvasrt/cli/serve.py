"""`canvasrt serve`: serves a package or engines through Triton and an OpenAI front end."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt.cli.options import AsJson, Lenient, Origins, Threads
from canvasrt.cli.serve_output import build, show_decisions, show_ready, unbuilt
from canvasrt.containers.names import API_PORT, GRPC_PORT, HTTP_PORT, METRICS_PORT
from canvasrt.defaults import PREFIX_CACHE
from canvasrt.errors import UsageError

# A default of None marks an option that was not given, which NIM_PASSTHROUGH_ARGS or the
# environment may set.
Bundle = Annotated[
    Path | None,
    typer.Argument(
        metavar="BUNDLE_OR_CHECKPOINT",
        show_default=False,
        help="A folder that `canvasrt package` or `build` wrote, or a checkpoint (a folder, a hub name or demo),"
        " which is built first; NIM_MODEL_PATH.",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="The address to listen on; 0.0.0.0 for all.",
    ),
]
TritonHost = Annotated[
    str | None,
    typer.Option(
        "--triton-host",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="The address for Triton's HTTP and gRPC, which check no key.",
    ),
]
TritonBehindProxy = Annotated[
    bool | None,
    typer.Option(
        "--triton-behind-proxy",
        show_default=False,
        help="A proxy checks who reaches Triton's ports; needed for --triton-host with keys or TLS.",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--allowed-hosts",
        metavar="HOST[,HOST...]",
        show_default="loopback's, on loopback",
        help="The names under which a server without API keys answers.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="ID",
        show_default="the GPU's",
        help="The id or name of a serving profile; see `list-model-profiles`. NIM_MODEL_PROFILE.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        show_default=False,
        help="The folder for engines built at the first start; NIM_CACHE_PATH.",
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        show_default="INFO",
        help="TRACE, DEBUG, INFO, WARNING, ERROR or CRITICAL; NIM_LOG_LEVEL.",
    ),
]


def _port(name: str, default: int | None, what: str) -> Any:
    shown = str(default) if default else False
    return typer.Option(name, metavar="PORT", min=0, max=65535, show_default=shown, help=what)


Port = Annotated[
    int | None,
    _port("--port", API_PORT, "Port of the OpenAI API; 0 takes a free one. NIM_SERVER_PORT."),
]
HealthPort = Annotated[
    int | None,
    _port("--health-port", None, "A second port, with only health routes; NIM_HEALTH_PORT."),
]
HttpPort = Annotated[
    int | None,
    _port("--http-port", HTTP_PORT, "Port of Triton's HTTP API; 0 takes a free one."),
]
GrpcPort = Annotated[
    int | None,
    _port("--grpc-port", GRPC_PORT, "Port of Triton's gRPC API; 0 takes a free one."),
]
MetricsPort = Annotated[
    int | None,
    _port("--metrics-port", METRICS_PORT, "Port of Triton's metrics; 0 takes a free one."),
]
Names = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME[,NAME...]",
        show_default="canvasrt",
        help="The model's names in the OpenAI API; NIM_SERVED_MODEL_NAME.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="TOKENS",
        min=1,
        show_default="the engines'",
        help="Maximum tokens per request, prompt plus answer; NIM_MAX_MODEL_LEN.",
    ),
]
SslMode = Annotated[
    str | None,
    typer.Option(
        "--ssl-mode",
        metavar="MODE",
        show_default="disabled",
        help="TLS for the OpenAI API: disabled, tls or mtls; NIM_SSL_MODE.",
    ),
]
SslCert = Annotated[
    Path | None,
    typer.Option(
        "--ssl-cert",
        metavar="FILE",
        show_default=False,
        help="The server's certificate; NIM_SSL_CERTS_PATH.",
    ),
]
SslKey = Annotated[
    Path | None,
    typer.Option(
        "--ssl-key",
        metavar="FILE",
        show_default=False,
        help="The certificate's key; NIM_SSL_KEY_PATH.",
    ),
]
SslCa = Annotated[
    Path | None,
    typer.Option(
        "--ssl-ca",
        metavar="FILE",
        show_default=False,
        help="The authority that signs callers' certificates, for mtls; NIM_SSL_CA_CERTS_PATH.",
    ),
]
Log = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="FILE",
        show_default="a file in the state folder",
        help="The file for the servers' output; - for stderr.",
    ),
]
JsonLogs = Annotated[
    bool | None,
    typer.Option(
        "--json-logs/--text-logs",
        show_default=False,
        help="Log to stderr, one JSON object per line; NIM_JSONL_LOGGING.",
    ),
]
Verbose = Annotated[
    bool | None,
    typer.Option("--verbose", "-v", show_default=False, help="Copy the log to stderr."),
]
ReadyTimeout = Annotated[
    float | None,
    typer.Option(
        "--ready-timeout",
        metavar="SECONDS",
        min=0,
        show_default="600",
        help="How long loading the engines may take.",
    ),
]
ExitTimeout = Annotated[
    int | None,
    typer.Option(
        "--exit-timeout",
        metavar="SECONDS",
        min=0,
        show_default="10",
        help="How long requests in flight may take at shutdown.",
    ),
]
StallTimeout = Annotated[
    float | None,
    typer.Option(
        "--stall-timeout",
        metavar="SECONDS",
        min=1,
        show_default="300",
        help="How long one pass may take; after that, the server ends with exit code 4.",
    ),
]


def _limit(name: str, what: str, default: str = "none") -> Any:
    return typer.Option(name, metavar="N", min=1, show_default=default, help=what)


MaxSteps = Annotated[
    int | None, _limit("--max-steps", "Most denoising steps per block that a request may ask for.")
]
MaxPasses = Annotated[
    int | None,
    _limit("--max-passes", "Most denoising passes of a request: blocks times steps times answers."),
]
MaxAnswers = Annotated[int | None, _limit("--max-n", "Most answers per prompt.", "128")]
MaxQueueTokens = Annotated[
    int | None,
    _limit("--max-queue-tokens", "Most tokens of all requests that run or wait.", "4194304"),
]
MaxKeyRequests = Annotated[
    int | None, _limit("--max-key-requests", "Most requests of one API key at once.")
]
MaxConnections = Annotated[
    int | None, _limit("--max-connections", "Most connections to the OpenAI API.", "1024")
]
RequestTimeout = Annotated[
    int | None,
    typer.Option(
        "--request-timeout",
        metavar="SECONDS",
        min=1,
        show_default="none",
        help="How long one request may take, its wait included.",
    ),
]
SharePasses = Annotated[
    bool | None,
    typer.Option(
        "--share-passes",
        show_default=False,
        help="On a GPU, let requests share passes, which then always have room for a full batch: higher"
        " throughput, but a lone request is slower.",
    ),
]
PrefixCache = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache",
        metavar="MIB",
        min=0,
        show_default=str(PREFIX_CACHE),
        help="Memory for the beginnings that prompts share, on the GPU if there is one; 0 for none.",
    ),
]
AllowRemoteImages = Annotated[
    bool | None,
    typer.Option(
        "--allow-remote-images",
        show_default=False,
        help="Fetch images that requests give by URL, from public addresses only. Without it, only data URLs work.",
    ),
]
DryRun = Annotated[
    bool | None,
    typer.Option(
        "--dry-run",
        show_default=False,
        help="Print what would be served, and where; start nothing.",
    ),
]


def serve(
    bundle: Bundle = None,
    host: Host = None,
    hosts: Hosts = None,
    origins: Origins = None,
    lenient: Lenient = None,
    triton_host: TritonHost = None,
    triton_behind_proxy: TritonBehindProxy = None,
    port: Port = None,
    health_port: HealthPort = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    names: Names = None,
    max_model_len: MaxModelLen = None,
    profile: Profile = None,
    cache: Cache = None,
    ssl_mode: SslMode = None,
    ssl_cert: SslCert = None,
    ssl_key: SslKey = None,
    ssl_ca: SslCa = None,
    log: Log = None,
    log_level: LogLevel = None,
    json_logs: JsonLogs = None,
    verbose: Verbose = None,
    ready_timeout: ReadyTimeout = None,
    exit_timeout: ExitTimeout = None,
    stall_timeout: StallTimeout = None,
    max_steps: MaxSteps = None,
    max_passes: MaxPasses = None,
    max_n: MaxAnswers = None,
    max_queue_tokens: MaxQueueTokens = None,
    max_key_requests: MaxKeyRequests = None,
    max_connections: MaxConnections = None,
    request_timeout: RequestTimeout = None,
    threads: Threads = None,
    share_passes: SharePasses = None,
    prefix_cache: PrefixCache = None,
    allow_remote_images: AllowRemoteImages = None,
    dry_run: DryRun = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model over the OpenAI API, HTTP and gRPC until Ctrl-C or SIGTERM.

    A checkpoint is built for this machine first, into the cache: for its GPU, or else for the CPU.
    Options that are not given come from NIM_PASSTHROUGH_ARGS, else from the NIM variables named
    below. If CANVASRT_API_KEYS or CANVASRT_API_KEYS_FILE is set, the OpenAI API requires one of
    its keys.
    """
    given = {name: value for name, value in locals().items() if name in _PARAMETERS}

    from canvasrt.containers.serve import local
    from canvasrt.containers.serve import serve as work
    from canvasrt.containers.serve.settings import resolve

    settings = resolve(_given(given), _given(_passthrough()))
    if settings.bundle is not None and local.is_checkpoint(settings.bundle):
        found = local.plan(settings.bundle, settings.cache)
        if settings.dry_run and not found.is_built:
            show_decisions(unbuilt(found), settings.as_json)
            return
        build(found)
        settings = replace(settings, bundle=found.engines)
    if settings.dry_run:
        show_decisions(work.decisions(settings), settings.as_json)
        return
    work.run(settings, lambda where: show_ready(where, settings), sys.stderr)


_PARAMETERS = frozenset(serve.__annotations__) - {"return"}


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by name; None also marks a `--json` that was not given."""
    return {**options, "as_json": options.get("as_json") or None}


def _passthrough() -> dict[str, Any]:
    """Return the options in NIM_PASSTHROUGH_ARGS, parsed like the command line."""
    from canvasrt.cli.app import parsed_command
    from canvasrt.containers.serve.settings import PASSTHROUGH

    text = os.environ.get(PASSTHROUGH, "").strip()
    if not text:
        return {}
    try:
        context = parsed_command("serve").make_context(PASSTHROUGH, shlex.split(text))
    except Exception as error:
        reason = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UsageError(
            f"{PASSTHROUGH} is {text!r}: {reason}", "set it to options of `canvasrt serve`"
        ) from None
    return dict(context.params)
