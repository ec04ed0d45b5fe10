"""`canvasrt list-model-profiles`: lists the serving profiles of a package."""

from __future__ import annotations

from canvasrt.cli.options import AsJson, ServedBundle


def list_model_profiles(bundle: ServedBundle = None, as_json: AsJson = False) -> None:
    """List the serving profiles of a package, and which of them run on this machine."""
    from canvasrt.cli.serving_profiles import show_profiles

    show_profiles(bundle, as_json)
