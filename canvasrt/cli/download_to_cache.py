"""`canvasrt download-to-cache`: builds engines ahead of the first start."""

from __future__ import annotations

from typing import Annotated

import typer

from canvasrt.cli.serve import Bundle, Cache, Profile


def download_to_cache(
    bundle: Bundle = None,
    profile: Profile = None,
    every: Annotated[
        bool, typer.Option("--all", help="Build every serving profile that this machine can run.")
    ] = False,
    cache: Cache = None,
) -> None:
    """Put a serving profile's engines into the cache, so that the next start finds them.

    Nothing is downloaded: a package contains its engines, or graphs from which this builds them.
    """
    from canvasrt.cli.profiles import fill_cache

    fill_cache(bundle, profile, every, cache)
