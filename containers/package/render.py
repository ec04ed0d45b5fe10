"""Renders the text files of a package: the Dockerfile, its .dockerignore and the compose file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canvasrt.containers.names import API_KEYS, CONTAINER_VARIABLES, END_UNHEALTHY, PACKAGE, ROOT
from canvasrt.containers.package import image_settings as image
from canvasrt.containers.package.sizes import TEMPORARY

_TEMPLATES = Path(__file__).parent.parent / "templates"
_SERVICE = "canvasrt"  # the host name by which other services in the compose file call the server
# Template → its path in the package.
_FILES = {
    "Dockerfile": "Dockerfile",
    "dockerignore": ".dockerignore",
    "compose.yaml": "compose.yaml",
}


def render_files(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the files' texts by path. `facts` are the templates' variables, such as `base` and `settings`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the templates are not HTML
    )
    # Writes a command in a Dockerfile's JSON form; jinja's `tojson` would escape it for HTML.
    environment.filters["exec"] = lambda words: json.dumps(list(words))
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
        "probe": image.PROBE,
        "entrypoint": image.ENTRYPOINT,
        "command": image.COMMAND,
        "temporary": TEMPORARY,
        "end_unhealthy": END_UNHEALTHY,
        "keys": API_KEYS,
        "variables": {name: make(_SERVICE) for name, make in CONTAINER_VARIABLES.items()},
        "service": _SERVICE,
        "grace": image.STOP_GRACE,
        "open": " ".join([*image.COMMAND, "--triton-host", "0.0.0.0"]),  # noqa: S104
    }
    return {place: environment.get_template(name).render(known) for name, place in _FILES.items()}
