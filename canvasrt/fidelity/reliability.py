"""The calibration of a bundle's probabilities as tables, a reliability diagram and a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from canvasrt.pages import render_page, section
from canvasrt.pages.drawing import OURS, THEIRS, drawing, figure_of
from canvasrt.types import Json

HEADS = (
    *("", "questions", "right", "ECE", "ECE by chance"),
    *("Brier", "at best", "log loss", "distance"),
)
FIT_HEADS = ("type", "temperature", "ECE", "ECE fitted", "Brier", "Brier fitted")


def rows(part: Json) -> list[list[str]]:
    """Return the rows of all questions, of each type, and of each group."""
    named = [("all", part["all"]), *((each["name"], each) for each in part["types"])]
    named += [(each["name"], each) for each in part["groups"]]
    return [_row(name, each) for name, each in named]


def _row(name: str, each: Json) -> list[str]:
    chance = each["ece_by_chance"]
    return [
        name,
        f"{each['questions']:,}",
        f"{each['right']:.1%}",
        f"{each['ece']:.3f}",
        f"{chance['mean']:.3f} (up to {chance['p95']:.3f})",
        f"{each['brier']:.3f}",
        f"{each['brier_at_best']:.3f}",
        f"{each['log_loss']:.3f}",
        "–" if each["distance"] is None else f"{each['distance']:.3f}",
    ]


def fit_rows(report: Json) -> list[list[str]]:
    """Return what fitted temperatures change, by type of question."""
    if report["fit"] is None:
        return []
    before = {each["name"]: each for each in report["types"]}
    return [
        [
            each["name"],
            f"{report['fit']['temperatures'][each['name']]:g}",
            f"{before[each['name']]['ece']:.3f}",
            f"{each['ece']:.3f}",
            f"{before[each['name']]['brier']:.3f}",
            f"{each['brier']:.3f}",
        ]
        for each in report["fit"]["types"]
    ]


def calibration_verdict(report: Json) -> str:
    """Return in one sentence whether the probabilities are calibrated, as far as this measures it."""
    found = report["all"]
    chance = found["ece_by_chance"]["p95"]
    text = f"ECE {found['ece']:.3f} over {found['questions']:,} questions"
    if found["ece"] <= chance:
        return f"{text}, no more than chance gives calibrated probabilities ({chance:.3f})."
    return f"{text}; calibrated probabilities would show at most {chance:.3f} by chance."


_NOTE = (
    "A predicate counts with the probability of yes, other questions with that of their likeliest"
    " option. ECE weighs |mean probability − share of right ones| over ten bins of equal width. By"
    " chance: what calibrated probabilities would show with so few answers, on average and in 95% of"
    " cases. Known probabilities are not answers, so they have no chance in them. Brier and log loss"
    " are over all options, and Brier at best is that of the right probabilities themselves; distance"
    " is the total variation to known probabilities."
)
FIT_NOTE = (
    "Log-probabilities are divided by the temperature. Fitted figures are of questions that their"
    " temperature was not fitted on. Requests use one when they send it as their temperatures."
)


def sections(report: Json) -> Iterator[Json]:
    """Yield the page's sections."""
    drawn = drawing("reliability", "Share of right answers by probability", _diagram, report)
    yield section("Reliability", _reading(report) + _NOTE, drawn, [(HEADS, rows(report))])
    if report["fit"]:
        yield section("Fitted temperatures", FIT_NOTE, None, [(FIT_HEADS, fit_rows(report))])


def reliability_lines(report: Json) -> Iterator[str]:
    """Yield the same as Markdown."""
    tables: list[Any] = [("Reliability", _reading(report) + _NOTE, HEADS, rows(report))]
    if report["fit"]:
        tables.append(("Fitted temperatures", FIT_NOTE, FIT_HEADS, fit_rows(report)))
    for title, note, heads, body in tables:
        yield from ("", f"## {title}", "", note, "")
        yield f"| {' | '.join(heads)} |"
        yield f"|{' --- |' * len(heads)}"
        yield from (f"| {' | '.join(row)} |" for row in body)


def reliability_page(report: Json, title: str, footer: str) -> str:
    """Return a page with nothing else. Raises CanvasError if matplotlib is not installed."""
    return render_page(title, [calibration_verdict(report)], list(sections(report)), footer)


def _reading(report: Json) -> str:
    draws = "one draw" if report["samples"] == 1 else f"{report['samples']} draws"
    steps = "one step" if report["steps"] == 1 else f"{report['steps']} steps"
    return f"{draws} of noise, {steps} per read. ".capitalize()


def _diagram(report: Json) -> Any:
    figure, axes = figure_of(4.2)
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=(0, (4, 3)))
    series = [("as read", OURS, "o", report["all"])]
    if report["fit"]:
        series.append(("fitted", THEIRS, "s", report["fit"]["all"]))
    for label, colour, marker, part in series:
        bins = part["bins"]
        x = np.array([each["probability"] for each in bins])
        y = np.array([each["right"] for each in bins])
        bounds = np.array([each["interval"] for each in bins]).T
        axes.errorbar(
            x,
            y,
            yerr=np.maximum(0, [y - bounds[0], bounds[1] - y]),
            fmt=marker,
            color=colour,
            markersize=5,
            elinewidth=1.4,
            capsize=3,
            label=label,
        )
        for each in bins:
            at = (each["probability"], each["right"])
            shift = (7, -11) if marker == "o" else (7, 6)
            axes.annotate(
                f"{each['questions']:,}",
                at,
                shift,
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    axes.set_xlabel("probability")
    axes.set_ylabel("share that is right, with 95% intervals")
    axes.set_xlim(-0.02, 1.04)
    axes.set_ylim(-0.04, 1.04)
    axes.grid()
    axes.legend(loc="upper left")
    return figure
