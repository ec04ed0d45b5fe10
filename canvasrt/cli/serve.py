"""`canvasrt serve`: a package or engines behind Triton and an OpenAI front end on this machine."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.generate import Threads
from canvasrt.cli.options import AsJson
from canvasrt.console import emit
from canvasrt.errors import UsageError

if TYPE_CHECKING:
    from canvasrt.containers.serve.settings import Settings

# Most defaults are None, which is how it is known that an option was not given: the environment and
# NIM_PASSTHROUGH_ARGS come after the command line.
Bundle = Annotated[
    Path | None,
    typer.Argument(
        metavar="[BUNDLE]",
        show_default=False,
        help="A folder that `canvasrt package` or `build` wrote; else NIM_MODEL_PATH.",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="Where to listen; 0.0.0.0 for all.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="ID",
        show_default="by the GPU",
        help="A profile's id or name, as `list-model-profiles` shows them; NIM_MODEL_PROFILE.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        show_default=False,
        help="Where engines are kept that are built at the first start; NIM_CACHE_PATH.",
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


def _port(name: str, default: str, what: str) -> Any:
    return typer.Option(name, metavar="PORT", show_default=default, help=what)


def serve(
    bundle: Bundle = None,
    host: Host = None,
    port: Annotated[
        int | None, _port("--port", "8000", "The OpenAI API; 0 takes a free one. NIM_SERVER_PORT.")
    ] = None,
    health_port: Annotated[
        int | None, _port("--health-port", "", "Health routes alone, too; NIM_HEALTH_PORT.")
    ] = None,
    http_port: Annotated[
        int | None, _port("--http-port", "8080", "Triton's HTTP; 0 takes a free one.")
    ] = None,
    grpc_port: Annotated[
        int | None, _port("--grpc-port", "8001", "Triton's gRPC; 0 takes a free one.")
    ] = None,
    metrics_port: Annotated[
        int | None, _port("--metrics-port", "8002", "Triton's metrics; 0 takes a free one.")
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME[,NAME...]",
            show_default="canvasrt",
            help="What the OpenAI API calls the model; NIM_SERVED_MODEL_NAME.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            metavar="TOKENS",
            min=1,
            show_default="the engines'",
            help="The longest prompt plus answer; NIM_MAX_MODEL_LEN.",
        ),
    ] = None,
    profile: Profile = None,
    cache: Cache = None,
    ssl_mode: Annotated[
        str | None,
        typer.Option(
            "--ssl-mode",
            metavar="MODE",
            show_default="disabled",
            help="TLS for the OpenAI API: disabled, tls or mtls; NIM_SSL_MODE.",
        ),
    ] = None,
    ssl_cert: Annotated[
        Path | None,
        typer.Option(
            "--ssl-cert",
            metavar="FILE",
            show_default=False,
            help="The server's certificate; NIM_SSL_CERTS_PATH.",
        ),
    ] = None,
    ssl_key: Annotated[
        Path | None,
        typer.Option(
            "--ssl-key", metavar="FILE", show_default=False, help="Its key; NIM_SSL_KEY_PATH."
        ),
    ] = None,
    ssl_ca: Annotated[
        Path | None,
        typer.Option(
            "--ssl-ca",
            metavar="FILE",
            show_default=False,
            help="Who signs callers' certificates, for mtls; NIM_SSL_CA_CERTS_PATH.",
        ),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="FILE",
            show_default=False,
            help="The servers' output; - for stderr. Without it, a file in the state folder.",
        ),
    ] = None,
    log_level: LogLevel = None,
    json_logs: Annotated[
        bool | None,
        typer.Option(
            "--json-logs/--text-logs",
            show_default=False,
            help="A JSON object a log line, on stderr; NIM_JSONL_LOGGING.",
        ),
    ] = None,
    verbose: Annotated[
        bool | None,
        typer.Option(
            "--verbose", "-v", show_default=False, help="Show the log's lines on stderr too."
        ),
    ] = None,
    ready_timeout: Annotated[
        float | None,
        typer.Option(
            "--ready-timeout",
            metavar="SECONDS",
            show_default="600",
            help="For loading the engines.",
        ),
    ] = None,
    exit_timeout: Annotated[
        int | None,
        typer.Option(
            "--exit-timeout",
            metavar="SECONDS",
            min=0,
            show_default="10",
            help="For requests in flight at the end.",
        ),
    ] = None,
    threads: Threads = None,
    share_passes: Annotated[
        bool | None,
        typer.Option(
            "--share-passes",
            show_default=False,
            help="On a GPU, run requests in shared passes: more throughput, but a seed no longer decides the"
            " tokens alone.",
        ),
    ] = None,
    dry_run: Annotated[
        bool | None,
        typer.Option(
            "--dry-run", show_default=False, help="Print what would be served, and where, and stop."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve over the OpenAI API, HTTP and gRPC until Ctrl-C or SIGTERM.

    What the command line does not say comes from NIM_PASSTHROUGH_ARGS, then from NIM's environment
    variables. Callers must show one of the API keys in CANVASRT_API_KEYS or CANVASRT_API_KEYS_FILE,
    where one of them is set.
    """
    given = {name: value for name, value in locals().items() if name in _PARAMETERS}

    from canvasrt.containers.serve import serve as work
    from canvasrt.containers.serve.settings import resolve

    settings = resolve(_renamed(given), _renamed(_passthrough()))
    if settings.dry_run:
        _show_decisions(work.decisions(settings), settings.as_json)
        return
    work.run(settings, lambda where: _show_ready(where, settings), sys.stderr)


_PARAMETERS = frozenset(serve.__annotations__) - {"return"}


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """Options as settings by name."""
    from canvasrt.containers.serve.settings import names_of

    settings = dict(given)
    names = settings.pop("served_model_name", None)
    if names is not None:
        try:
            settings["names"] = names_of(names)
        except ValueError as error:
            raise UsageError(f"--served-model-name {error}", "give a name") from None
    # False is what a flag says that was not given.
    settings["as_json"] = settings.get("as_json") or None
    return settings


def _passthrough() -> dict[str, Any]:
    """The options in NIM_PASSTHROUGH_ARGS, read as the command line's are."""
    from canvasrt.cli.app import parsed_command
    from canvasrt.containers.serve.settings import PASSTHROUGH

    text = os.environ.get(PASSTHROUGH, "").strip()
    if not text:
        return {}
    try:
        context = parsed_command("serve").make_context(PASSTHROUGH, shlex.split(text))
    except Exception as error:
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UsageError(
            f"{PASSTHROUGH} is {text!r}: {said}", "it takes the options of `canvasrt serve`"
        ) from None
    return dict(context.params)


def _show_ready(data: dict[str, Any], settings: Settings) -> None:
    if settings.json_logs and not settings.as_json:
        where = data["openai"], data["http"], data["grpc"]
        logging.getLogger(__name__).info("ready: openai %s http %s grpc %s", *where)
        return

    def render(shown: Any) -> None:
        shown.print(f"ready   openai {data['openai']}", markup=False)
        shown.print(f"triton  http {data['http']}   grpc {data['grpc']}", markup=False)
        shown.print(f"metrics {data['metrics']}", markup=False)
        if data["log"]:
            shown.print(f"log     {data['log']}", markup=False)
        shown.print(f"try     canvasrt infer '12+34=' --url {data['http']}", markup=False)

    emit(data, settings.as_json, render)
    sys.stdout.flush()


def _show_decisions(data: dict[str, Any], as_json: bool) -> None:
    def render(shown: Any) -> None:
        for name, value in data.items():
            if name == "profile":
                value = f"{value['name']} ({value['id']}) for {value['tags']['target']}"
            shown.print(f"{name}: {_plain(value)}", markup=False)

    emit(data, as_json, render)


def _plain(value: Any) -> str:
    """A setting as a person reads it."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
