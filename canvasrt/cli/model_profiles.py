"""Commands with NIM's names and options: `list-model-profiles`, `download-to-cache` and `create-model-store`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import AsJson, ServedBundle, option
from canvasrt.console import emit, size
from canvasrt.containers.serve.settings import Settings, read_settings
from canvasrt.errors import CanvasError, UsageError

if TYPE_CHECKING:
    from canvasrt.containers.serve.serving_profiles import ServingProfile

Every = Annotated[
    bool, typer.Option("--all", help="Build every serving profile that this machine can run.")
]
ModelStore = Annotated[
    Path,
    option(
        "--model-store, -m",
        "DIR",
        "The folder to write, which must be empty; serve it with NIM_MODEL_PATH or BUNDLE.",
    ),
]


def list_model_profiles(bundle: ServedBundle = None, as_json: AsJson = False) -> None:
    """List the serving profiles of a package, and which of them run on this machine."""
    from canvasrt import machine
    from canvasrt.containers.serve.serving_profiles import open_source, profiles_of

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
        shown.print(f"- GPUs: {'; '.join(found)}")
        shown.print("MODEL PROFILES")
        for title, fits in (
            ("Compatible with system and runnable:", True),
            ("Incompatible:", False),
        ):
            shown.print(f"- {title}")
            for row in rows:
                if row["compatible"] == fits:
                    shown.print(f"  - {_line(row)}")

    emit(data, render)


@with_fields("given", Settings, unset=True, only=("profile", "cache"))
def download_to_cache(
    given: dict[str, Any], bundle: ServedBundle = None, every: Every = False
) -> None:
    """Put a serving profile's engines into the cache, so that the next start finds them.

    Nothing is downloaded: a package contains engines, or graphs from which engines are built.
    """
    from canvasrt import machine
    from canvasrt.containers.serve.serving_profiles import choose_profile, open_source, profiles_of

    if given["profile"] is not None and every:
        raise UsageError("--all does not allow --profile", "leave out one of them")
    settings = _settings(bundle, **given)
    source = open_source(settings.bundle)
    chosen = [choose_profile(source, settings.profile)]
    if every:
        chosen = [each for each in profiles_of(source) if not each.misfit(machine.gpus())]
    for profile in chosen:
        path = _prepared(profile, settings.cache)
        print(f"{profile.id} {profile.name} {path}")


@with_fields("given", Settings, unset=True, only=("profile", "cache"))
def create_model_store(
    given: dict[str, Any], model_store: ModelStore, bundle: ServedBundle = None
) -> None:
    """Copy one serving profile's engines from a package into a folder that can be served by itself."""
    from canvasrt.bundle import load_bundle
    from canvasrt.containers.serve.serving_profiles import choose_profile, open_source
    from canvasrt.staging import check_output, staging

    settings = _settings(bundle, **given)
    check_output(model_store)
    source = open_source(settings.bundle)
    profile = choose_profile(source, settings.profile)
    engines = load_bundle(_prepared(profile, settings.cache))
    with staging(model_store) as folder:
        for name in (*engines.manifest.files, "manifest.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(engines.path / name, folder / name)
    print(f"{profile.id} {profile.name} {model_store}")


def _settings(bundle: Path | None, **given: Any) -> Settings:
    from canvasrt.containers.logs import configure

    settings = read_settings({"bundle": bundle, **given}, {})
    configure(settings.front.log_level, settings.front.json_logs)
    return settings


def _prepared(profile: ServingProfile, cache: Path | None) -> Path:
    from canvasrt.containers.serve.build_engines import Wait
    from canvasrt.containers.serve.prepare import engines_folder, prepare
    from canvasrt.containers.serve.supervisor import stop_request

    with stop_request() as stop:
        path = prepare(profile, cache, Wait(stop.requested))
    if path is None:
        raise CanvasError(
            "interrupted",
            f"{engines_folder(profile, cache)} was not written; run the command again to resume",
        )
    return path


def _line(row: dict[str, Any]) -> str:
    target = row["tags"]["target"]
    built = ", built at the first start" if row["builds"] else ""
    why = f": {row['reason']}" if row["reason"] else ""
    return f"{row['id']} ({row['name']}) for {target}{built}{why}"
