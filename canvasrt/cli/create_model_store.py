"""`canvasrt create-model-store`: copies the engines of one serving profile into their own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import ServedBundle
from canvasrt.containers.serve.settings import Settings


@with_fields("given", Settings, unset=True, only=("profile", "cache"))
def create_model_store(
    given: dict[str, Any],
    model_store: Annotated[
        Path,
        typer.Option(
            "--model-store",
            "-m",
            metavar="DIR",
            show_default=False,
            help="The folder to write, which must be empty; serve it with NIM_MODEL_PATH or BUNDLE.",
        ),
    ],
    bundle: ServedBundle = None,
) -> None:
    """Copy one serving profile's engines from a package into a folder that can be served by itself."""
    from canvasrt.cli.serving_profiles import write_store

    write_store(bundle, given["profile"], model_store, given["cache"])
