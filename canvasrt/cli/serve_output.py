"""What `canvasrt serve` prints: what it builds, decides and serves."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from canvasrt.console import console, emit, progress

if TYPE_CHECKING:
    from canvasrt.containers.serve.local import Local
    from canvasrt.containers.serve.settings import Settings


def show_build(found: Local) -> None:
    """Build a checkpoint's engines, and say what is happening, on stderr."""
    from canvasrt.containers.serve import local

    shown = console(stderr=True)
    if found.why and not found.is_built:
        shown.print(f"serving from the CPU: {found.why}", markup=False)
    with progress() as report:
        local.build_local(found, lambda text: shown.print(text, markup=False), report)


def unbuilt(found: Local) -> dict[str, Any]:
    """Return what a dry run shows of a checkpoint whose engines are not there yet."""
    return {
        "checkpoint": str(found.checkpoint),
        "target": found.target.name,
        "engines": str(found.engines),
        "builds_first": True,
    }


def show_ready(data: dict[str, Any], settings: Settings) -> None:
    """Print where a server answers, or log it where logs are JSON."""
    if settings.front.json_logs and not settings.as_json:
        addresses = data["openai"], data["http"], data["grpc"]
        logging.getLogger(__name__).info("ready: openai %s http %s grpc %s", *addresses)
        return

    def render(shown: Any) -> None:
        shown.print(f"ready   openai {data['openai']}", markup=False)
        shown.print(f"triton  http {data['http']}   grpc {data['grpc']}", markup=False)
        shown.print(f"metrics {data['metrics']}", markup=False)
        if data["log"]:
            shown.print(f"log     {data['log']}", markup=False)
        shown.print(f"try     canvasrt infer '12+34=' --url {data['http']}", markup=False)

    emit(data, settings.as_json, render)
    sys.stdout.flush()


def show_decisions(data: dict[str, Any], as_json: bool) -> None:
    """Print what a dry run found."""

    def render(shown: Any) -> None:
        for name, value in data.items():
            if name == "profile":
                value = f"{value['name']} ({value['id']}) for {value['tags']['target']}"
            shown.print(f"{name}: {_plain(value)}", markup=False)

    emit(data, as_json, render)


def _plain(value: Any) -> str:
    """Return a setting as text for a reader."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
