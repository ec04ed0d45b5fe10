"""Computes for `canvasrt targets` whether the released model fits a target's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt.build.memory import Estimate
from canvasrt.build.options import Precision, parse_precision
from canvasrt.build.plan import Plan, PrefillPlan, shortened
from canvasrt.build.source import Source
from canvasrt.checkpoints.released import released_model
from canvasrt.targets import Target

# The context length and the number of concurrent requests that must fit.
FIT_CONTEXT, FIT_BATCH = 8192, 1


@dataclass(frozen=True)
class Fit:
    """A precision in which the released model fits a target, and the memory that the model then takes. `precision` is a
    value of `--precision`."""

    precision: str
    memory: Estimate

    def to_json(self) -> dict[str, Any]:
        """Return the data for `canvasrt targets --json`."""
        return {
            "precision": self.precision,
            "memory": self.memory.total,
            "contexts_on_host": self.memory.contexts_on_host,
            "max_context": FIT_CONTEXT,
            "max_batch": FIT_BATCH,
        }


def released_fit(target: Target) -> Fit | None:
    """Return the first of a target's precisions in which the released model fits; None if it fits in none.

    For a CPU, whose memory is not known, return the precision that takes the least memory.
    """
    names = [target.default, *target.precisions[1:]]
    fits = [
        Fit(name, released_memory(parse_precision(name), target, FIT_CONTEXT, FIT_BATCH)[1])
        for name in names
    ]
    if target.memory is None:
        return min(fits, key=lambda fit: fit.memory.total)
    return next((fit for fit in fits if fit.memory.total <= (target.memory or 0)), None)


def released_memory(
    precision: Precision, target: Target, max_context: int, max_batch: int
) -> tuple[PrefillPlan, Estimate]:
    """Return the prefill plan of engines for the released model, and the memory that serving takes."""
    source = Source(Path("released"), released_model(), {})
    made = shortened(Plan(source, target, precision, max_context, max_batch, Path()))
    return made.reading, made.memory
