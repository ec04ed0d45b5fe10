"""`canvasrt download-to-cache`: engines made ahead of a start."""

from __future__ import annotations

from typing import Annotated

import typer

from canvasrt.cli.serve import Bundle, Cache, Profile


def download_to_cache(
    bundle: Bundle = None,
    profile: Profile = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every profile that this machine can run.")
    ] = False,
    cache: Cache = None,
) -> None:
    """Put the engines of a profile into the cache, so that the next start finds them.

    Nothing is downloaded: a package carries its engines, or the graphs that they are built from here.
    """
    from canvasrt.cli.profiles import fill_cache

    fill_cache(bundle, profile, every, cache)
