"""`canvasrt download-to-cache`: builds engines ahead of the first start."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import ServedBundle
from canvasrt.containers.serve.settings import Settings


@with_fields("given", Settings, unset=True, only=("profile", "cache"))
def download_to_cache(
    given: dict[str, Any],
    bundle: ServedBundle = None,
    every: Annotated[
        bool, typer.Option("--all", help="Build every serving profile that this machine can run.")
    ] = False,
) -> None:
    """Put a serving profile's engines into the cache, so that the next start finds them.

    Nothing is downloaded: a package contains its engines, or graphs from which this builds them.
    """
    from canvasrt.cli.serving_profiles import fill_cache

    fill_cache(bundle, given["profile"], every, given["cache"])
