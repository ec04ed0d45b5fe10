"""`canvasrt serve`: serves a package or engines through Triton and an OpenAI front end."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import AsJson, argument
from canvasrt.console import choose_json, console, emit, progress
from canvasrt.containers.serve.settings import OPTION_CLASSES, PASSTHROUGH, read_settings
from canvasrt.errors import UsageError

if TYPE_CHECKING:
    from canvasrt.containers.serve.local import Local
    from canvasrt.containers.serve.settings import Settings

Bundle = Annotated[
    Path | None,
    argument(
        "BUNDLE_OR_CHECKPOINT",
        "A folder that `canvasrt package` or `build` wrote, or a checkpoint (a folder, a hub name,"
        " demo or demo-vision), which is built first; NIM_MODEL_PATH.",
    ),
]


@with_fields("given", *OPTION_CLASSES, unset=True)
def serve(given: dict[str, Any], bundle: Bundle = None, as_json: AsJson = False) -> None:
    """Serve a model over the OpenAI API, HTTP and gRPC until Ctrl-C or SIGTERM.

    A checkpoint is built for this machine first, into the cache: for the GPU or, if no GPU is usable, for the CPU.
    Options that are not given come from NIM_PASSTHROUGH_ARGS or, if absent there, from the NIM variables named
    below. If CANVASRT_API_KEYS or CANVASRT_API_KEYS_FILE is set, the OpenAI API requires one of
    its keys.
    """
    from canvasrt.containers.serve import checks, local
    from canvasrt.containers.serve import serve as work
    from canvasrt.containers.serve.gpus import use_gpu

    settings = read_settings(
        _given({**given, "bundle": bundle, "as_json": as_json}), _given(_passthrough())
    )
    choose_json(settings.as_json)  # an environment variable can also ask for JSON
    checks.check_settings(settings)
    if settings.device is not None:
        use_gpu(settings.device)
    if settings.bundle is not None and local.is_checkpoint(settings.bundle):
        if settings.profile is not None:
            raise UsageError(
                f"--profile has no effect on the checkpoint {settings.bundle}, which is built for this machine",
                "leave it out, or give a folder that `canvasrt package` or `build` wrote",
            )
        found = local.plan_local(settings.bundle, settings.cache)
        if settings.dry_run and not found.is_built:
            planned = {
                "checkpoint": str(found.checkpoint),
                "target": found.target.name,
                **({"why": found.why} if found.why else {}),
                "engines": str(found.engines),
                "builds_first": True,
            }
            _show_decisions(planned)
            return
        if not found.is_built:
            checks.check_machine(settings)
        _show_build(found)
        settings = replace(settings, bundle=found.engines)
    if settings.dry_run:
        _show_decisions(work.decisions(settings))
        return
    work.run_server(settings, lambda where: _show_ready(where, settings), sys.stderr)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. An absent `--json` becomes None, like other absent options."""
    return {**options, "as_json": options.get("as_json") or None}


def _passthrough() -> dict[str, Any]:
    """Parse the options in NIM_PASSTHROUGH_ARGS as if they were on the command line."""
    from canvasrt.cli.app import parsed_command

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


def _show_build(found: Local) -> None:
    """Build a checkpoint's engines, and show the progress on stderr."""
    from canvasrt.containers.serve import local

    shown = console(stderr=True)
    if found.why and not found.is_built:
        shown.print(f"serving from the CPU: {found.why}")
    with progress():
        local.build_local(found, lambda text: shown.print(text))


def _show_ready(data: dict[str, Any], settings: Settings) -> None:
    """Print a server's addresses, or log them if logs are JSON."""
    if settings.front.json_logs and not settings.as_json:
        addresses = data["openai"], data["http"], data["grpc"]
        logging.getLogger(__name__).info("ready: openai %s http %s grpc %s", *addresses)
        return

    def render(shown: Any) -> None:
        shown.print(f"ready   openai {data['openai']}")
        shown.print(f"triton  http {data['http']}   grpc {data['grpc']}")
        shown.print(f"metrics {data['metrics']}")
        if data["log"]:
            shown.print(f"log     {data['log']}")
        shown.print(f"try     canvasrt infer '12+34=' --url {data['http']}")

    emit(data, render)
    sys.stdout.flush()


def _show_decisions(data: dict[str, Any]) -> None:
    """Print a dry run's result."""

    def render(shown: Any) -> None:
        for name, value in data.items():
            if name == "profile":
                value = f"{value['name']} ({value['id']}) for {value['tags']['target']}"
            shown.print(f"{name}: {_plain(value)}")

    emit(data, render)


def _plain(value: Any) -> str:
    """Format a setting for the terminal."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
