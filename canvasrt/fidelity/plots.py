"""Draws the report's plots as inline SVG."""

from __future__ import annotations

from typing import Any

import numpy as np

from canvasrt.fidelity.compare import PHASES, phase_of
from canvasrt.fidelity.reliability import diagram
from canvasrt.pages.drawing import LABELLED, OURS, THEIRS, THIRD, bars, drawing, figure_of, points
from canvasrt.types import Json


def plots(report: Json) -> dict[str, str]:
    """Return name → SVG of each plot for which the report has numbers."""
    drawn = {
        name: drawing(name, about, draw, report)
        for name, draw, needs, about in (
            ("steps", _steps, "steps", "Divergence of the logits by denoising step"),
            ("answers", _answers, "answers", "Share of right answers by task with 95% intervals"),
            ("pace", _pace, "answers", "Denoising steps per block by task"),
            ("segments", _segments, "segments", "Relative error of each segment's outputs"),
            ("layers", _layers, "layers", "Relative error of each layer's output"),
            ("experts", _experts, "experts", "Relative error of each expert's output"),
        )
        if report[needs]
    }
    if report.get("decisions"):
        drawn["reliability"] = diagram(report["decisions"])
    return drawn


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
    rows = [*report["answers"]["tasks"], {"task": "all", **report["answers"]["all"]}]
    figure, axes = figure_of(0.9 + 0.34 * len(rows))
    places = np.arange(len(rows))[::-1]
    for side, label, colour, marker, shift in (
        ("reference", "transformers", THEIRS, "s", 0.14),
        ("bundle", "bundle", OURS, "o", -0.14),
    ):
        shares = [100 * row[side]["share"] for row in rows]
        bounds = [[100 * each for each in row[side]["interval"]] for row in rows]
        at = [place + shift for place in places]
        points(axes, at, shares, bounds, label, colour, marker, sideways=True)
    axes.axhline(0.5, color="#bbbbbb", linewidth=0.8)
    axes.set_yticks(places, [row["task"] for row in rows])
    axes.set_xlabel("exactly right, %, with 95% intervals")
    axes.set_xlim(right=100.6)
    axes.grid(axis="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return figure


def _pace(report: Json) -> Any:
    rows = [*report["answers"]["tasks"], {"task": "all", "pace": report["pace"]}]
    sides = (("transformers", THEIRS, "reference"), ("bundle", OURS, "bundle"))
    series = [
        (label, colour, [row["pace"][side]["steps_per_block"] for row in rows])
        for label, colour, side in sides
    ]
    return bars([row["task"] for row in rows], series, "{:.1f}", "denoising steps per block")


def _segments(report: Json) -> Any:
    rows = report["segments"]
    outputs = (
        *(("hidden states", OURS, "hidden_out"), ("keys", THIRD, "keys")),
        ("values", THEIRS, "values"),
    )
    series = [
        (label, colour, [row[key]["denoise"] for row in rows]) for label, colour, key in outputs
    ]
    names = [f"{row['name']} (layers {row['layers'][0]} to {row['layers'][-1]})" for row in rows]
    return bars(names, series, "{:.2g}", "relative error, denoising")


def _layers(report: Json) -> Any:
    rows = report["layers"]
    phases = (("encode", THIRD), ("denoise", OURS))
    series = [(phase, colour, [row[phase] for row in rows]) for phase, colour in phases]
    few = len(rows) <= LABELLED
    names = [f"{row['layer']} {row['kind']}" if few else str(row["layer"]) for row in rows]
    return bars(names, series, "{:.2g}", "relative error of its output", "layer")


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
    if columns <= LABELLED:
        axes.set_xticks(np.arange(columns))
        middle = np.nanmax(grid) / 2 if np.isfinite(grid).any() else 0
        for (row, column), value in np.ndenumerate(grid):
            text = "–" if np.isnan(value) else f"{value:.2g}"
            colour = "black" if np.isnan(value) or value > middle else "white"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8.5)
    figure.colorbar(image, ax=axes, label="relative error", pad=0.015)
    return figure
