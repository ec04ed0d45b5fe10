"""A calibration's progress on disk. After an interruption, the calibration continues from there, with the same
result."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from canvasrt.errors import CanvasError
from canvasrt.staging import is_disk_full, sync

# At least this many seconds pass between saves, because saving a small model's sweep takes longer than running it.
SAVE_EVERY = 10.0
_STATE = "state.pt"


class SavedSweeps:
    """One calibration's state in a folder: tensors of every sweep, and a file of keys and values per request."""

    def __init__(self, folder: Path, device: str) -> None:
        """Read the state of an interrupted calibration. `state` is empty if nothing was saved, or if a file is missing
        or cut off. It is also empty if another device saved it, because the devices' sums differ in their last bits."""
        self._folder, self._device = folder, device
        folder.mkdir(exist_ok=True)
        self._saved = time.monotonic()
        self.state: dict[str, Any] = {}
        try:
            state = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
            sizes = {name: (folder / name).stat().st_size for name in state["files"].values()}
            if state["device"] != device or state["sizes"] != sizes:
                raise ValueError("another device's, or incomplete")
            self.state = state
        except Exception:  # no state, or one so damaged that any line above can fail
            (folder / _STATE).unlink(missing_ok=True)
        self._files: dict[int, str] = dict(self.state.get("files", {}))
        self._clean()

    def caches(self, number: int) -> Any:
        """Return a request's keys and values as last saved."""
        return torch.load(self._folder / self._files[number], weights_only=True)

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved >= SAVE_EVERY

    def save(
        self, sweeps: int, state: Mapping[str, Any], rows: Mapping[int, Any], live: set[int]
    ) -> None:
        """Save the state after `sweeps` sweeps. `rows` has the changed keys and values by request; `live` has the
        requests that still run. If the disk is full, the earlier state is kept, and CanvasError is raised."""
        files = {number: name for number, name in self._files.items() if number in live}
        files |= {number: f"row-{number}-{sweeps}.pt" for number in rows}
        try:
            for number, caches in rows.items():
                _write(caches, self._folder / files[number])
            sizes = {name: (self._folder / name).stat().st_size for name in files.values()}
            whole = {**state, "device": self._device, "files": files, "sizes": sizes}
            _write(whole, self._folder / f"{_STATE}.new")
            os.replace(self._folder / f"{_STATE}.new", self._folder / _STATE)
        except (OSError, RuntimeError) as error:
            is_full = is_disk_full(error, self._folder)  # checked before `_clean` frees space
            self._clean()
            if not is_full:
                raise
            raise CanvasError(
                f"no space left in {self._folder}, which keeps the calibration's progress",
                "free space there, or name another disk with CANVASRT_CACHE, then repeat the command; it"
                " continues after the last sweep that was saved",
            ) from error
        self._files, self._saved = files, time.monotonic()
        self._clean()

    def _clean(self) -> None:
        """Remove files that the state does not name."""
        for file in self._folder.iterdir():
            if file.name not in (_STATE, *self._files.values()):
                file.unlink()


def _write(value: Any, file: Path) -> None:
    """Save tensors to a file that Python opened, because torch's own writer hides why a write failed."""
    with file.open("wb") as out:
        torch.save(value, out)
    sync(file)  # the state must not be renamed before its rows are on the disk
