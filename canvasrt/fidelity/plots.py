"""Draws the report's plots as inline SVG."""

from __future__ import annotations

from typing import Any

import numpy as np

from canvasrt.fidelity.compare import PHASES, phase_of
from canvasrt.pages.drawing import OURS, THEIRS, THIRD, drawing, figure_of
from canvasrt.types import Json

# Bars are numbered up to this many.
_LABELLED = 12
_GROUPS = 4


def plots(report: Json) -> dict[str, str]:
    """Return SVG by plot, without plots that the report has no numbers for."""
    drawn = {}
    for name, draw, needs in (
        ("steps", _steps, "steps"),
        ("answers", _answers, "answers"),
        ("pace", _pace, "answers"),
        ("segments", _segments, "segments"),
        ("layers", _layers, "layers"),
        ("experts", _experts, "experts"),
    ):
        if report[needs]:
            drawn[name] = drawing(name, _DESCRIPTIONS[name], draw, report)
    return drawn


_DESCRIPTIONS = {
    "steps": "Divergence of the logits by denoising step",
    "answers": "Share of right answers by task with 95% intervals",
    "pace": "Denoising steps per block by task",
    "segments": "Relative error of each segment's outputs",
    "layers": "Relative error of each layer's output",
    "experts": "Relative error of each expert's output",
}


def _steps(report: Json) -> Any:
    figure, axes = figure_of(2.9)
    by_step = report["steps"]["by_step"]
    count = len(by_step)
    steps = np.arange(1, count + 1)
    if by_step[0]["kl_mean"] is None:
        shares = [100 * (1 - each["argmax_agreement"]) for each in by_step]
        axes.plot(steps, shares, color=OURS, marker="o")
        axes.set_ylabel("different best token, %")
    else:
        for key, label, colour, marker in (
            ("kl_p99", "99th percentile", THEIRS, "s"),
            ("kl_mean", "mean", OURS, "o"),
        ):
            values = [max(each[key], 1e-17) for each in by_step]
            axes.plot(steps, values, color=colour, marker=marker, markersize=4.5, label=label)
        axes.set_yscale("log")
        axes.set_ylabel("KL divergence, nats")
        axes.legend(loc="upper right", ncols=2)
    axes.margins(y=0.22)
    axes.grid(axis="y")
    axes.set_xticks(steps)
    axes.set_xlabel("denoising step")
    for name in PHASES:
        held = [i for i in range(count) if phase_of(i, count) == name]
        if held[0]:
            axes.axvline(held[0] + 0.5, color="#bbbbbb", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            name, (held[0] + 0.6, 0.03), xycoords=("data", "axes fraction"), color="#666666"
        )
    axes.set_xlim(0.5, count + 0.5)
    return figure


def _answers(report: Json) -> Any:
    answers = report["answers"]
    rows = [*answers["tasks"], {"task": "all", **answers["all"]}]
    figure, axes = figure_of(0.9 + 0.34 * len(rows))
    places = np.arange(len(rows))[::-1]
    for side, label, colour, marker, shift in (
        ("reference", "transformers", THEIRS, "s", 0.14),
        ("bundle", "bundle", OURS, "o", -0.14),
    ):
        shares = np.array([100 * row[side]["share"] for row in rows])
        bounds = 100 * np.array([row[side]["interval"] for row in rows]).T
        axes.errorbar(
            shares,
            places + shift,
            xerr=np.maximum(0, [shares - bounds[0], bounds[1] - shares]),
            fmt=marker,
            color=colour,
            markersize=5,
            elinewidth=1.6,
            capsize=3,
            label=label,
        )
    axes.axhline(0.5, color="#bbbbbb", linewidth=0.8)
    axes.set_yticks(places, [row["task"] for row in rows])
    axes.set_xlabel("exactly right, %, with 95% intervals")
    axes.set_xlim(right=100.6)
    axes.grid(axis="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return figure


def _pace(report: Json) -> Any:
    rows = [*report["answers"]["tasks"], {"task": "all", "pace": report["pace"]}]
    figure, axes = figure_of(2.6)
    series = [
        ("transformers", THEIRS, [row["pace"]["reference"]["steps_per_block"] for row in rows]),
        ("bundle", OURS, [row["pace"]["bundle"]["steps_per_block"] for row in rows]),
    ]
    _bars(axes, [row["task"] for row in rows], series, "{:.1f}")
    axes.set_ylabel("denoising steps per block")
    return figure


def _segments(report: Json) -> Any:
    rows = report["segments"]
    figure, axes = figure_of(2.6)
    series = [
        (label, colour, [row[key]["denoise"] for row in rows])
        for label, colour, key in (
            ("hidden states", OURS, "hidden_out"),
            ("keys", THIRD, "keys"),
            ("values", THEIRS, "values"),
        )
    ]
    names = [f"{row['name']} (layers {row['layers'][0]} to {row['layers'][-1]})" for row in rows]
    _bars(axes, names, series, "{:.2g}")
    axes.set_ylabel("relative error, denoising")
    return figure


def _layers(report: Json) -> Any:
    rows = report["layers"]
    figure, axes = figure_of(2.6)
    series = [
        ("encode", THIRD, [row["encode"] for row in rows]),
        ("denoise", OURS, [row["denoise"] for row in rows]),
    ]
    few = len(rows) <= _LABELLED
    names = [f"{row['layer']} {row['kind']}" if few else str(row["layer"]) for row in rows]
    _bars(axes, names, series, "{:.2g}")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of its output")
    return figure


def _experts(report: Json) -> Any:
    from matplotlib import colormaps

    experts = report["experts"]
    layers = sorted({each["layer"] for each in experts})
    columns = max(each["expert"] for each in experts) + 1
    grid = np.full((len(layers), columns), np.nan)
    for each in experts:
        if each["output"] is not None:
            grid[layers.index(each["layer"]), each["expert"]] = each["output"]
    figure, axes = figure_of(min(7.0, 1.1 + 0.34 * len(layers)))
    colours = colormaps["cividis"].with_extremes(bad="#d9d9d9")
    image = axes.imshow(grid, cmap=colours, vmin=0, aspect="auto", interpolation="none")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(np.arange(len(layers)), layers)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    if columns <= _LABELLED:
        axes.set_xticks(np.arange(columns))
        middle = np.nanmax(grid) / 2 if np.isfinite(grid).any() else 0
        for (row, column), value in np.ndenumerate(grid):
            text = "–" if np.isnan(value) else f"{value:.2g}"
            colour = "black" if np.isnan(value) or value > middle else "white"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8.5)
    figure.colorbar(image, ax=axes, label="relative error", pad=0.015)
    return figure


def _bars(
    axes: Any, names: list[str], series: list[tuple[str, str, list[float]]], form: str
) -> None:
    """Draw groups of bars from zero, with their numbers if there is room."""
    width = 0.8 / len(series)
    places = np.arange(len(names))
    for number, (label, colour, values) in enumerate(series):
        at = places + (number - (len(series) - 1) / 2) * width
        bars = axes.bar(at, values, width * 0.94, color=colour, label=label)
        if len(names) * len(series) <= 2 * _LABELLED:
            labels = [form.format(value) for value in values]
            axes.bar_label(bars, labels, fontsize=8, padding=1.5)
    axes.set_xticks(places, names)
    # Few groups get the same width as many would.
    spare = max(0.0, (_GROUPS - len(names)) / 2)
    axes.set_xlim(-0.6 - spare, len(names) - 0.4 + spare)
    axes.margins(y=0.12)
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(series), borderaxespad=0.2)
