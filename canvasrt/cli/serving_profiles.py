"""What `list-model-profiles`, `download-to-cache` and `create-model-store` do."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from canvasrt import machine
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.console import emit, size
from canvasrt.containers.logs import configure
from canvasrt.containers.openai.options import ServerPhase
from canvasrt.containers.serve.prepare import engines_folder, prepare
from canvasrt.containers.serve.serving_profiles import (
    ServingProfile,
    choose_profile,
    open_source,
    profiles_of,
)
from canvasrt.containers.serve.settings import Settings, read_settings
from canvasrt.containers.serve.signals import stop_request
from canvasrt.errors import CanvasError, UsageError
from canvasrt.staging import staging


def show_profiles(bundle: Path | None, as_json: bool) -> None:
    """Print the serving profiles, those that run here first."""
    settings = _settings(bundle)
    gpus = machine.gpus()
    rows = [
        {**each.to_json(), "compatible": not each.misfit(gpus), "reason": each.misfit(gpus)}
        for each in profiles_of(open_source(settings.bundle))
    ]
    data = {"gpus": [gpu.to_json() for gpu in gpus], "profiles": rows}

    def render(shown: Any) -> None:
        shown.print("SYSTEM INFO")
        found = [f"{gpu.name}, {size(gpu.memory)}" for gpu in gpus] or ["none"]
        shown.print(f"- GPUs: {'; '.join(found)}", markup=False)
        shown.print("MODEL PROFILES")
        for title, fits in (
            ("Compatible with system and runnable:", True),
            ("Incompatible:", False),
        ):
            shown.print(f"- {title}", markup=False)
            for row in rows:
                if row["compatible"] == fits:
                    shown.print(f"  - {_line(row)}", markup=False)

    emit(data, as_json, render)


def fill_cache(bundle: Path | None, wanted: str | None, every: bool, cache: Path | None) -> None:
    """Build the engines that the first start would build."""
    if wanted is not None and every:
        raise UsageError("--all does not allow --profile", "leave out one of them")
    settings = _settings(bundle, profile=wanted, cache=cache)
    source = open_source(settings.bundle)
    chosen = [choose_profile(source, settings.profile)]
    if every:
        chosen = [each for each in profiles_of(source) if not each.misfit(machine.gpus())]
    for profile in chosen:
        path = _prepared(source, profile, settings.cache)
        print(f"{profile.id} {profile.name} {path}")


def write_store(bundle: Path | None, wanted: str | None, out: Path, cache: Path | None) -> None:
    """Copy one serving profile's engines to `out`."""
    settings = _settings(bundle, profile=wanted, cache=cache)
    source = open_source(settings.bundle)
    profile = choose_profile(source, settings.profile)
    engines = load_bundle(_prepared(source, profile, settings.cache))
    with staging(out) as folder:
        for name in (*engines.manifest.files, "manifest.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(engines.path / name, folder / name)
    print(f"{profile.id} {profile.name} {out}")


def _settings(bundle: Path | None, **given: Any) -> Settings:
    settings = read_settings({"bundle": bundle, **given}, {})
    configure(settings.front.log_level, settings.front.json_logs)
    return settings


def _prepared(source: Bundle, profile: ServingProfile, cache: Path | None) -> Path:
    def notify(phase: ServerPhase, detail: str) -> None:
        logging.getLogger(__name__).debug("%s: %s", phase, detail)

    with stop_request() as stop:
        path = prepare(source, profile, cache, notify, stop.requested)
    if path is None:
        raise CanvasError(
            "interrupted",
            f"{engines_folder(profile, cache)} was not written; run it again to resume",
        )
    return path


def _line(row: dict[str, Any]) -> str:
    target = row["tags"]["target"]
    built = ", built at the first start" if row["builds"] else ""
    why = f": {row['reason']}" if row["reason"] else ""
    return f"{row['id']} ({row['name']}) for {target}{built}{why}"
