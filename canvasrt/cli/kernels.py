"""`canvasrt inspect --kernels`: prints the kernels of an engine bundle and their predicted times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from canvasrt.console import emit, show_section
from canvasrt.targets import TARGETS
from canvasrt.types import Json


def show(
    bundle: Any,
    batch: int,
    context: int,
    capacity: int | None,
    gpu: str | None,
    measured: Path | None,
    page: Path | None,
) -> None:
    """Predict a bundle's passes, and print the predictions. If `page` is a folder, also write an HTML page there."""
    from canvasrt.roofline import rates
    from canvasrt.roofline.predict import Predictor
    from canvasrt.roofline.report import prediction_report
    from canvasrt.roofline.sections import heading, sections

    predictor = Predictor(bundle)
    if capacity is not None:
        predictor.check_capacity(batch, capacity)
    target = bundle.manifest.target or {}
    found = rates.find_gpu(gpu or _usual_gpu(target))
    if measured is not None:
        found = rates.measured(found, measured)
    data = prediction_report(predictor, found, batch, context, capacity)
    if page is not None:
        from canvasrt.roofline.page import write_page

        write_page(data, bundle.path.resolve().name, page)

    def render(console: Any) -> None:
        for line in heading(data):
            console.print(line)
        for each in sections(data):
            show_section(console, each)
        if page is not None:
            console.print(f"\npage: {page / 'kernels.html'}")

    emit(data, render)


def _usual_gpu(target: Json) -> str:
    """Return the default GPU for predictions: the target's own, or else a GPU with the target's first capability."""
    from canvasrt.roofline.rates import GPUS

    name, capabilities = target.get("name", ""), target.get("compute_capability", "")
    if name in GPUS:
        return name
    first = capabilities.partition(",")[0]
    alike = (each.name for each in TARGETS if each.capability_text == first and each.name in GPUS)
    return next(alike, name)
