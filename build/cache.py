"""Engines kept between builds, found again by all that decides them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canvasrt.bundle import canonical, hash_files
from canvasrt.errors import CanvasError
from canvasrt.staging import check_output, staging

_ENGINE, _ENTRY = "engine", "entry.json"


def cache_folder() -> Path:
    """`CANVASRT_CACHE`, or canvasrt's folder in the user's cache."""
    if own := os.environ.get("CANVASRT_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "canvasrt"


class EngineCache:
    """A folder with one folder an engine, named by the SHA-256 of what the engine was built from."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_folder()) / "engines"

    def check(self) -> None:
        """Raise CanvasError when nothing can be written here."""
        try:
            check_output(self.folder / "new")
        except CanvasError as error:
            raise self._unusable(error) from error

    def key(self, made_from: Mapping[str, Any]) -> str:
        """The name of the engine that is made from this."""
        return hashlib.sha256(canonical(made_from).encode()).hexdigest()

    def find(self, made_from: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
        """The engine's file and its `sha256` and `bytes`; None when it is not here or damaged."""
        folder = self.folder / self.key(made_from)
        try:
            entry = json.loads((folder / _ENTRY).read_text(encoding="utf-8"))["file"]
            if hash_files(folder, [_ENGINE])[_ENGINE] == entry["sha256"]:
                return folder / _ENGINE, entry
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def keep(self, made_from: Mapping[str, Any], engine: Path) -> dict[str, Any]:
        """Keep an engine's file for later builds; return its `sha256` and `bytes`."""
        entry = {
            "sha256": hash_files(engine.parent, [engine.name])[engine.name],
            "bytes": engine.stat().st_size,
        }
        folder = self.folder / self.key(made_from)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with staging(folder) as tmp:
                take_over(engine, tmp / _ENGINE)
                text = canonical({"made_from": made_from, "file": entry})
                (tmp / _ENTRY).write_text(text, encoding="utf-8")
        except CanvasError as error:
            # Otherwise another build kept the same in the meantime.
            if self.find(made_from) is None:
                raise self._unusable(error) from error
        return entry

    def _unusable(self, error: CanvasError) -> CanvasError:
        return CanvasError(
            f"engines cannot be kept in {self.folder}: {error.message}",
            "set CANVASRT_CACHE to a folder that can be written, with space for the engines",
        )


def take_over(source: Path, destination: Path) -> None:
    """Link a file, which takes no space; copy it where the disk is another."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
