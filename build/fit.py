"""Whether a target has room for the released model: what `canvasrt targets` says of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from canvasrt.build.memory import Estimate, Reading, estimate, reading
from canvasrt.build.needs import has_short_segments
from canvasrt.build.precision import Precision, parse_precision
from canvasrt.checkpoints.released import released_model
from canvasrt.defaults import LAYERS_PER_SEGMENT, SHORT_SEGMENT
from canvasrt.targets import Target

# The context that is asked about, and requests at a time.
FIT_CONTEXT, FIT_BATCH = 8192, 1


@dataclass(frozen=True)
class Fit:
    """What the released model fits a target in, as `--precision` takes it, and the memory then."""

    precision: str
    memory: Estimate

    def to_json(self) -> dict[str, Any]:
        """As `canvasrt targets --json` prints it."""
        return {
            "precision": self.precision,
            "memory": self.memory.total,
            "max_context": FIT_CONTEXT,
            "max_batch": FIT_BATCH,
        }


def released_fit(target: Target) -> Fit | None:
    """Return the first of a target's precisions in which the released model fits; None if none does.

    A CPU has as much memory as its machine: there it is the precision that takes the least.
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
) -> tuple[Reading, Estimate]:
    """Return how the released model's prompts are read on a target, and the memory then, as a build of it plans."""
    model, on_cpu = released_model(), target.capability is None
    formats = precision.formats(model)

    def of(way: Reading, layers: int) -> Estimate:
        return estimate(
            model,
            precision.name,
            max_context,
            max_batch,
            on_cpu,
            formats,
            layers_per_segment=layers,
            **way._asdict(),
        )

    short = has_short_segments(model, precision, formats, target.memory, of)
    layers = SHORT_SEGMENT if short else LAYERS_PER_SEGMENT
    way = reading(model, target.memory, lambda way: of(way, layers))
    return way, of(way, layers)
