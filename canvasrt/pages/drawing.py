"""Plots for pages: one style, as reproducible SVG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from canvasrt.extras import require

# From Okabe and Ito's palette, which is safe for colour-blind readers.
OURS, THEIRS, THIRD = "#0072B2", "#E69F00", "#56B4E9"
# For more series, dark enough for white labels.
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
    # Plots on one page must not share the names of their parts.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"canvasrt-{name}"}):
        return _svg(draw(*data), description)


def figure_of(height: float, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure `height` inches high, and its axes: `columns` of them side by side."""
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
