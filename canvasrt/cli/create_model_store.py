"""`canvasrt create-model-store`: copies the engines of one serving profile into their own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from canvasrt.cli.serve import Bundle, Cache, Profile


def create_model_store(
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
    bundle: Bundle = None,
    profile: Profile = None,
    cache: Cache = None,
) -> None:
    """Copy one serving profile's engines from a package into a folder that can be served by itself."""
    from canvasrt.cli.profiles import write_store

    write_store(bundle, profile, model_store, cache)
