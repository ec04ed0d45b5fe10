"""Checks the prompts that a user gives for calibration."""

from __future__ import annotations

from pathlib import Path

from canvasrt.errors import CanvasError, UsageError


def check_calibration(file: Path | None, is_calibrated: bool, what: str) -> None:
    """Check the option for calibration prompts.

    Raises UsageError if prompts are given without `is_calibrated`; the message calls the result `what`. Raises
    CanvasError if the file is missing.
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
