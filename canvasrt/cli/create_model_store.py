"""`canvasrt create-model-store`: the engines of one profile as a folder of their own."""

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
            help="The folder to write, for NIM_MODEL_PATH or BUNDLE. It must not hold anything yet.",
        ),
    ],
    bundle: Bundle = None,
    profile: Profile = None,
    cache: Cache = None,
) -> None:
    """Copy the engines of one profile out of a package into a folder that can be served by itself."""
    from canvasrt.cli.profiles import write_store

    write_store(bundle, profile, model_store, cache)
