"""Draws the plots of pages, all in one style, as reproducible SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from canvasrt.extras import require

# From Okabe and Ito's palette, which is safe for colour-blind readers.
OURS, THEIRS, THIRD = "#0072B2", "#E69F00", "#56B4E9"
# Colours for more series, dark enough for white labels on them.
COLOURS = (
    OURS,
    "#b36b00",
    "#00795a",
    "#3d8fc4",
    "#a8527f",
    "#D55E00",
    "#5c4b8a",
    "#7a7a7a",
    "#7d6a2e",
    "#2f4858",
    "#333333",
)
INK, PALE = "#333333", "#e6e6e6"
WIDTH = 8.4  # inches
# Charts with more items than this get fewer labels.
LABELLED = 12
_GROUPS = 4
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "font.family": "sans-serif",
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def drawing(name: str, description: str, draw: Callable[..., Any], *data: Any) -> str:
    """Return the SVG of the figure that `draw(*data)` makes. Raises CanvasError if matplotlib is not installed."""
    matplotlib = require("matplotlib", "report")
    # Element ids must differ between the plots on one page.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"canvasrt-{name}"}):
        return _svg(draw(*data), description)


def figure_of(height: float, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure `height` inches high and its axes, or a sequence of axes if there are several `columns`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns) if columns > 1 else figure.add_subplot()


def _svg(figure: Any, description: str) -> str:
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=nothing, transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return text.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)


def bars(
    names: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[float]]],
    form: str,
    unit: str,
    below: str = "",
) -> Any:
    """Return a figure of groups of bars, with their values if there is room for text. A series is a label, a colour
    and values; `unit` labels the y axis, `below` the x axis."""
    figure, axes = figure_of(2.6)
    width = 0.8 / len(series)
    for number, (label, colour, values) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * width
        places = [place + shift for place in range(len(names))]
        drawn = axes.bar(places, values, width * 0.94, color=colour, label=label)
        if len(names) * len(series) <= 2 * LABELLED:
            axes.bar_label(drawn, [form.format(each) for each in values], fontsize=8, padding=1.5)
    axes.set_xticks(range(len(names)), names)
    # A chart of few groups gets margins, so that its groups are not wider than those of other charts.
    spare = max(0.0, (_GROUPS - len(names)) / 2)
    axes.set_xlim(-0.6 - spare, len(names) - 0.4 + spare)
    axes.margins(y=0.12)
    # The default formatter prints a factor under the legend.
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y")
    axes.set_xlabel(below)
    axes.set_ylabel(unit)
    if len(series) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(series), borderaxespad=0.2)
    return figure


def points(
    axes: Any,
    at: Sequence[float],
    values: Sequence[float],
    intervals: Sequence[Sequence[float]],
    label: str,
    colour: str,
    marker: str,
    sideways: bool = False,
) -> None:
    """Draw values and their intervals. `at` are places on the x axis or, if `sideways` is true, on the y axis."""
    pairs = zip(values, intervals, strict=True)
    errors = [[max(0.0, v - low), max(0.0, high - v)] for v, (low, high) in pairs]
    below_above = [list(each) for each in zip(*errors, strict=True)]
    axes.errorbar(
        *((values, at) if sideways else (at, values)),
        **{"xerr" if sideways else "yerr": below_above},
        fmt=marker,
        color=colour,
        markersize=5,
        elinewidth=1.5,
        capsize=3,
        label=label,
    )
