"""Whether a target has room for the released model: what `canvasrt targets` says of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from canvasrt.build.memory import Estimate, Reading, estimate, reading
from canvasrt.checkpoints.released import released_model
from canvasrt.targets import Target

# The context that is asked about, and requests at a time.
CONTEXT, BATCH = 8192, 1


@dataclass(frozen=True)
class Fit:
    """The precision in which the released model fits a target, and the memory that it takes then."""

    precision: str
    memory: Estimate

    def to_json(self) -> dict[str, Any]:
        """As `canvasrt targets --json` prints it."""
        return {
            "precision": self.precision,
            "memory": self.memory.total,
            "max_context": CONTEXT,
            "max_batch": BATCH,
        }


def released_fit(target: Target) -> Fit | None:
    """Return the first of a target's precisions in which the released model fits; None if none does.

    A CPU has as much memory as its machine: there it is the precision that takes the least.
    """
    fits = [Fit(name, _estimate(name, target)) for name in target.precisions]
    if target.memory is None:
        return min(fits, key=lambda fit: fit.memory.total)
    return next((fit for fit in fits if fit.memory.total <= (target.memory or 0)), None)


def _estimate(precision: str, target: Target) -> Estimate:
    model, on_cpu = released_model(), target.capability is None

    def of(way: Reading) -> Estimate:
        return estimate(model, precision, CONTEXT, BATCH, on_cpu, **way._asdict())

    return of(reading(model, target.memory, of))
