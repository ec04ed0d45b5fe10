"""Checks the option that names a file of calibration prompts."""

from __future__ import annotations

from pathlib import Path

from canvasrt.errors import CanvasError, UsageError


def check_calibration(file: Path | None, is_calibrated: bool, what: str) -> None:
    """Check the option for calibration prompts.

    Raises UsageError if there is a file although `is_calibrated` is false; the message says that `what` needs no
    calibration. Raises CanvasError if the file does not exist.
    """
    if file is None:
        return
    if not is_calibrated:
        raise UsageError(
            f"--calibration has no effect: {what} needs no calibration",
            "leave --calibration out, or choose a recipe that rounds activations",
        )
    if not file.expanduser().is_file():
        raise CanvasError(
            f"no calibration file at {file}", "give a JSONL file of prompts, or leave it out"
        )
