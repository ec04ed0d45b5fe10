"""Writes the prediction as an HTML page: the parts of a pass's time, and how the time grows with batch and context."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from canvasrt.pages import render_page
from canvasrt.pages.drawing import COLOURS, INK, drawing, figure_of
from canvasrt.roofline.group import PARTS
from canvasrt.roofline.sections import heading, sections
from canvasrt.staging import staging
from canvasrt.types import Json

FILES = ("kernels.json", "kernels.html")
_COLOUR = dict(zip(PARTS, COLOURS, strict=True))
# A part shorter than this share of the longest bar gets no label.
_LABELLED = 0.06


def write_page(data: Json, name: str, folder: Path) -> None:
    """Write `FILES` to an empty folder. Raises CanvasError if matplotlib is not installed."""
    with staging(folder) as tmp:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        (tmp / FILES[0]).write_text(text, encoding="utf-8")
        (tmp / FILES[1]).write_text(kernels_page(data, f"Kernels of {name}"), encoding="utf-8")


def kernels_page(data: Json, title: str) -> str:
    """Return the page as HTML."""
    drawn = {
        kind: drawing(f"parts-{kind}", f"Milliseconds by part of a {kind} pass", _parts, made)
        for kind, made in data["passes"].items()
    }
    for by, label in (("batch", "requests per pass"), ("context", "cached tokens per request")):
        grown = data["growth"][by]
        if len(grown) > 1:
            about = f"A denoising pass by {by}"
            drawn[by] = drawing(f"growth-{by}", about, _growth, grown, by, label)
    footer = "Written by canvasrt inspect --kernels."
    return render_page(title, heading(data), list(sections(data, drawn)), footer)


def _parts(made: Json) -> Any:
    """Draw one bar per segment, divided into parts of the network."""
    names = [each["segment"] for each in made["segments"]]
    figure, axes = figure_of(1.3 + 0.34 * len(names))
    times: dict[str, dict[str, float]] = {name: {} for name in names}
    for row in made["each"]:
        held = times[row["segment"]]
        held[row["part"]] = held.get(row["part"], 0.0) + row["us"] / 1e3
    places = list(range(len(names)))[::-1]
    totals = _stack(axes, axes.barh, places, [times[name] for name in names])
    axes.set_yticks(places, names)
    axes.set_xlim(0, 1.03 * max(totals))
    axes.set_xlabel("milliseconds, predicted")
    axes.grid(axis="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
    return figure


def _stack(
    axes: Any, draw: Callable[..., Any], places: Sequence[int], times: Sequence[Json]
) -> list[float]:
    """Draw a bar at each place, divided into parts of the network; return the bars' totals. `draw` is `axes.bar` or
    `axes.barh`."""
    ends = [0.0] * len(places)
    whole = max(sum(each.values()) for each in times)
    for part in PARTS:
        values = [each.get(part, 0.0) for each in times]
        if not any(values):
            continue
        bars = draw(places, values, 0.65, ends, color=_COLOUR[part], label=part)
        labels = [f"{value:.2g}" if value > _LABELLED * whole else "" for value in values]
        axes.bar_label(bars, labels, label_type="center", fontsize=8, color="white")
        ends = [before + value for before, value in zip(ends, values, strict=True)]
    return ends


def _growth(grown: Sequence[Json], by: str, label: str) -> Any:
    """Draw one bar per size, divided into parts of the network and labelled with its total; the floor is a line."""
    figure, axes = figure_of(3.2)
    places = list(range(len(grown)))
    totals = _stack(axes, axes.bar, places, [each["parts"] for each in grown])
    for place, total in zip(places, totals, strict=True):
        axes.annotate(f"{total:.3g}", (place, total), ha="center", va="bottom", fontsize=8.5)
    floors = [each["floor_ms"] for each in grown]
    axes.hlines(
        floors, [p - 0.38 for p in places], [p + 0.38 for p in places], color=INK, label="floor"
    )
    axes.set_xticks(places, [f"{each[by]:,}" for each in grown])
    axes.set_xlabel(label)
    axes.set_ylabel("milliseconds, predicted")
    axes.margins(y=0.12)
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2)
    return figure
