"""The text files of a package: Dockerfile, compose file, and what Kubernetes gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canvasrt.containers.names import PACKAGE, ROOT
from canvasrt.containers.package import settings as image

_TEMPLATES = Path(__file__).parent.parent / "templates"
# Template → its place in the package.
_FILES = {
    "Dockerfile": "Dockerfile",
    "dockerignore": ".dockerignore",
    "compose.yaml": "compose.yaml",
}


def render(facts: Mapping[str, Any]) -> dict[str, str]:
    """Every file by its name. `facts`: `base`, `tag`, `engines`, `tensorrt` and the image's `settings`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # none of these is HTML
    )
    environment.filters["exec"] = _exec
    settings: image.ImageSettings = facts["settings"]
    known = {
        **facts,
        "root": ROOT,
        "package": PACKAGE,
        "cache": image.CACHE,
        "user": image.USER,
        "ports": image.PORTS,
        "environment": settings.environment,
        "health": settings.health,
        "grace": image.STOP_GRACE,
    }
    return {place: environment.get_template(name).render(known) for name, place in _FILES.items()}


def _exec(words: Sequence[str]) -> str:
    """A command in a Dockerfile's JSON form; jinja's own `tojson` would escape quotes for HTML."""
    return json.dumps(list(words))
