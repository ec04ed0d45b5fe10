"""The prediction as a page: what takes a pass's time, and how it grows with batch and context."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from canvasrt.defaults import SLOTTED
from canvasrt.kernels.group import PARTS
from canvasrt.pages import render_page, section
from canvasrt.pages.drawing import COLOURS, INK, drawing, figure_of
from canvasrt.staging import staging
from canvasrt.types import Json

FILES = ("kernels.json", "kernels.html")
_COLOUR = dict(zip(PARTS, COLOURS, strict=True))
# Pieces narrower than this share of the longest bar get no label.
_LABELLED = 0.06


def write_page(data: Json, name: str, folder: Path) -> None:
    """Write `FILES` into a folder that holds nothing yet. Raises CanvasError if matplotlib is not installed."""
    with staging(folder) as tmp:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        (tmp / FILES[0]).write_text(text, encoding="utf-8")
        (tmp / FILES[1]).write_text(kernels_page(data, f"Kernels of {name}"), encoding="utf-8")


def kernels_page(data: Json, title: str) -> str:
    """Return the page as HTML."""
    gpu, sizes = data["gpu"], data["sizes"]
    where = f"measured on {gpu['measured']}" if gpu["measured"] else gpu["source"]
    subjects = [
        data["note"],
        *([data["foreign"]] if data["foreign"] else []),
        f"{gpu['name']}, {gpu['reached'] * gpu['bandwidth'] / 1e9:,.0f} GB/s reached, "
        f"{gpu['arithmetic']:.0%} of the rates of products ({where}); batch {sizes['batch']}, "
        f"context {sizes['context']:,}",
    ]
    return render_page(
        title, subjects, list(_blocks(data)), "Written by canvasrt inspect --kernels."
    )


def _slots(experts: str, capacity: int) -> str:
    return f"{capacity} slots per expert" if experts == SLOTTED else "rows sorted by expert"


def _blocks(data: Json) -> Iterator[Json]:
    for kind, made in data["passes"].items():
        ratio = made["ms"] / made["floor_ms"]
        sizes = made["sizes"]
        note = (
            f"{sizes['batch']} × {sizes['length']} tokens, {_slots(data['sizes']['experts'], sizes['capacity'])}:"
            f" {made['ms']:.3g} ms and {made['kernels']} kernels; the floor is {made['floor_ms']:.3g} ms, so the pass"
            f" takes {ratio:.2f} times that."
        )
        plot = drawing(f"parts-{kind}", f"Milliseconds by part of a {kind} pass", _parts, made)
        yield section(f"A pass: {kind}", note, plot, [(_HEADS, _rows(made))], last_is_total=True)
    for by, label in (("batch", "requests per pass"), ("context", "cached tokens per request")):
        grown = data["growth"][by]
        if len(grown) > 1:
            plot = drawing(
                f"growth-{by}",
                f"A denoising pass by {by}",
                _growth,
                grown,
                by,
                label,
            )
            heads = [by, "experts", "ms", "floor, ms", "times the floor"]
            rows = [
                [
                    f"{each[by]:,}",
                    _slots(data["sizes"]["experts"], each["capacity"]),
                    f"{each['ms']:.3g}",
                    f"{each['floor_ms']:.3g}",
                    f"{each['ms'] / each['floor_ms']:.2f}",
                ]
                for each in grown
            ]
            yield section(f"A denoising pass by {by}", "", plot, [(heads, rows)])


_HEADS = ["part", "kernels", "formats", "MB", "Gop", "ms", "share"]


def _rows(made: Json) -> list[list[str]]:
    rows = [
        [
            each["part"],
            str(each["kernels"]),
            " ".join(each["formats"]),
            f"{each['bytes'] / 1e6:,.1f}",
            f"{each['operations'] / 1e9:,.1f}",
            f"{each['ms']:.3f}",
            f"{each['ms'] / made['ms']:.1%}",
        ]
        for each in made["parts"]
    ]
    total = (sum(each[key] for each in made["parts"]) for key in ("kernels", "bytes", "operations"))
    count, moved, operations = total
    return [
        *rows,
        [
            "all",
            str(count),
            "",
            f"{moved / 1e6:,.1f}",
            f"{operations / 1e9:,.1f}",
            f"{made['ms']:.3f}",
            "",
        ],
    ]


def _parts(made: Json) -> Any:
    """Draw one bar per segment, split by part."""
    names = [each["segment"] for each in made["segments"]]
    figure, axes = figure_of(1.3 + 0.34 * len(names))
    times: dict[str, dict[str, float]] = {name: {} for name in names}
    for row in made["each"]:
        held = times[row["segment"]]
        held[row["part"]] = held.get(row["part"], 0.0) + row["us"] / 1e3
    _stacked(axes, names, [times[name] for name in names])
    axes.set_xlabel("milliseconds, predicted")
    return figure


def _stacked(axes: Any, names: Sequence[str], times: Sequence[Json]) -> None:
    places = list(range(len(names)))[::-1]
    left = [0.0] * len(names)
    whole = max(sum(each.values()) for each in times)
    for part in PARTS:
        values = [each.get(part, 0.0) for each in times]
        if not any(values):
            continue
        bars = axes.barh(places, values, 0.7, left=left, color=_COLOUR[part], label=part)
        labels = [f"{value:.2g}" if value > _LABELLED * whole else "" for value in values]
        axes.bar_label(bars, labels, label_type="center", fontsize=8, color="white")
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set_yticks(places, names)
    axes.set_xlim(0, 1.03 * whole)
    axes.grid(axis="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)


def _growth(grown: Sequence[Json], by: str, label: str) -> Any:
    """Draw one bar per size, split by part, with its total, and the floor as a line."""
    figure, axes = figure_of(3.2)
    places = list(range(len(grown)))
    below = [0.0] * len(grown)
    for part in PARTS:
        values = [each["parts"].get(part, 0.0) for each in grown]
        if any(values):
            axes.bar(places, values, 0.6, bottom=below, color=_COLOUR[part], label=part)
            below = [before + value for before, value in zip(below, values, strict=True)]
    for place, total in zip(places, below, strict=True):
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
