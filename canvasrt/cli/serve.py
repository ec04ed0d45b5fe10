"""`canvasrt serve`: serves a package or engines through Triton and an OpenAI front end."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import AsJson
from canvasrt.cli.serve_output import show_build, show_decisions, show_ready, unbuilt
from canvasrt.containers.serve.settings import OPTION_CLASSES, PASSTHROUGH, read_settings
from canvasrt.errors import UsageError

Bundle = Annotated[
    Path | None,
    typer.Argument(
        metavar="BUNDLE_OR_CHECKPOINT",
        show_default=False,
        help="A folder that `canvasrt package` or `build` wrote, or a checkpoint (a folder, a hub name,"
        " demo or demo-vision), which is built first; NIM_MODEL_PATH.",
    ),
]


@with_fields("given", *OPTION_CLASSES, unset=True)
def serve(given: dict[str, Any], bundle: Bundle = None, as_json: AsJson = False) -> None:
    """Serve a model over the OpenAI API, HTTP and gRPC until Ctrl-C or SIGTERM.

    A checkpoint is built for this machine first, into the cache: for its GPU, or else for the CPU.
    Options that are not given come from NIM_PASSTHROUGH_ARGS, else from the NIM variables named
    below. If CANVASRT_API_KEYS or CANVASRT_API_KEYS_FILE is set, the OpenAI API requires one of
    its keys.
    """
    from canvasrt.containers.serve import checks, local
    from canvasrt.containers.serve import serve as work

    settings = read_settings(
        _given({**given, "bundle": bundle, "as_json": as_json}), _given(_passthrough())
    )
    checks.check_settings(settings)
    if settings.bundle is not None and local.is_checkpoint(settings.bundle):
        if settings.profile is not None:
            raise UsageError(
                f"--profile has no effect: {settings.bundle} is a checkpoint, built for this machine",
                "leave it out, or give a folder that `canvasrt package` or `build` wrote",
            )
        found = local.plan_local(settings.bundle, settings.cache)
        if settings.dry_run and not found.is_built:
            show_decisions(unbuilt(found), settings.as_json)
            return
        if not found.is_built:
            checks.check_machine(settings)
        show_build(found)
        settings = replace(settings, bundle=found.engines)
    if settings.dry_run:
        show_decisions(work.decisions(settings), settings.as_json)
        return
    work.run_server(settings, lambda where: show_ready(where, settings), sys.stderr)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by name; None also marks a `--json` that was not given."""
    return {**options, "as_json": options.get("as_json") or None}


def _passthrough() -> dict[str, Any]:
    """Return the options in NIM_PASSTHROUGH_ARGS, parsed like the command line."""
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
