"""`canvasrt list-model-profiles`: which engines of a package run on this machine."""

from __future__ import annotations

from canvasrt.cli.options import AsJson
from canvasrt.cli.serve import Bundle


def list_model_profiles(bundle: Bundle = None, as_json: AsJson = False) -> None:
    """Show the profiles of a package, and which of them run on this machine."""
    from canvasrt.cli.profiles import show_profiles

    show_profiles(bundle, as_json)
