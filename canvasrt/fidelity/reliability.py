"""The calibration of a bundle's probabilities: the report's sections about it, and the reliability diagram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from canvasrt.pages import section, table_of
from canvasrt.pages.drawing import OURS, THEIRS, drawing, figure_of, points
from canvasrt.types import Json

_NOTE = (
    "For a predicate, the plot and ECE use the probability of yes; for other questions, the probability of the likeliest"
    " option. ECE is the mean of |mean probability − share of right answers| over ten bins of equal width, weighted by"
    " their numbers of questions. ECE by chance is the ECE that perfectly calibrated probabilities would show on this"
    " number of questions: its mean and 95th percentile. It is 0 if the right probabilities are known. Brier score and"
    " log loss count all options. The column “at best” has the Brier score of the right probabilities. Distance is the"
    " total variation distance from known probabilities."
)
_FIT_NOTE = (
    "Log-probabilities are divided by the temperature. Fitted figures are measured on questions that were"
    " not used to fit the temperature. To use fitted temperatures, send them as a request's `temperatures`."
)


def reliability_sections(
    report: Json, drawn: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Json]:
    """Yield a section on all questions, each type and each group; and a section on what fitted temperatures change."""
    draws = "one draw" if report["samples"] == 1 else f"{report['samples']} draws"
    steps = "one step" if report["steps"] == 1 else f"{report['steps']} steps"
    note = f"{draws} of noise, {steps} per read. ".capitalize() + _NOTE
    yield section("Reliability", note, drawn.get("reliability"), [_figures(report)])
    if report["fit"]:
        yield section("Fitted temperatures", _FIT_NOTE, tables=[_fitted(report)])


def _figures(report: Json) -> Any:
    def chance(each: Json) -> str:
        return f"{each['ece_by_chance']['mean']:.3f} (up to {each['ece_by_chance']['p95']:.3f})"

    columns = {
        "": lambda each: each["name"],
        "questions": lambda each: f"{each['questions']:,}",
        "right": lambda each: f"{each['right']:.1%}",
        "ECE": lambda each: f"{each['ece']:.3f}",
        "ECE by chance": chance,
        "Brier": lambda each: f"{each['brier']:.3f}",
        "at best": lambda each: f"{each['brier_at_best']:.3f}",
        "log loss": lambda each: f"{each['log_loss']:.3f}",
        "distance": lambda each: "–" if each["distance"] is None else f"{each['distance']:.3f}",
    }
    parts = [{"name": "all", **report["all"]}, *report["types"], *report["groups"]]
    return table_of(parts, columns)


def _fitted(report: Json) -> Any:
    before = {each["name"]: each for each in report["types"]}
    columns = {
        "type": lambda each: each["name"],
        "temperature": lambda each: f"{report['fit']['temperatures'][each['name']]:g}",
        "ECE": lambda each: f"{before[each['name']]['ece']:.3f}",
        "ECE fitted": lambda each: f"{each['ece']:.3f}",
        "Brier": lambda each: f"{before[each['name']]['brier']:.3f}",
        "Brier fitted": lambda each: f"{each['brier']:.3f}",
    }
    return table_of(report["fit"]["types"], columns)


def calibration_verdict(report: Json) -> str:
    """Return in one sentence whether the probabilities are calibrated, as far as these questions show."""
    found = report["all"]
    chance = found["ece_by_chance"]["p95"]
    text = f"ECE {found['ece']:.3f} over {found['questions']:,} questions"
    if found["ece"] <= chance:
        return f"{text}, within the {chance:.3f} that calibrated probabilities may show by chance."
    return f"{text}, more than the {chance:.3f} that calibrated probabilities may show by chance."


def diagram(report: Json) -> str:
    """Return the reliability diagram as SVG. Raises CanvasError if matplotlib is not installed."""
    return drawing("reliability", "Share of right answers by probability", _diagram, report)


def _diagram(report: Json) -> Any:
    figure, axes = figure_of(4.2)
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=(0, (4, 3)))
    series = [("as read", OURS, "o", report["all"])]
    if report["fit"]:
        series.append(("fitted", THEIRS, "s", report["fit"]["all"]))
    for label, colour, marker, part in series:
        x, y, intervals = (
            [each[key] for each in part["bins"]] for key in ("probability", "right", "interval")
        )
        points(axes, x, y, intervals, label, colour, marker)
        for each, *at in zip(part["bins"], x, y, strict=True):
            shift = (7, -11) if marker == "o" else (7, 6)
            count = f"{each['questions']:,}"
            style = {"textcoords": "offset points", "fontsize": 8, "color": colour}
            axes.annotate(count, at, shift, **style)
    axes.set_xlabel("probability")
    axes.set_ylabel("share that is right, with 95% intervals")
    axes.set_xlim(-0.02, 1.04)
    axes.set_ylim(-0.04, 1.04)
    axes.grid()
    axes.legend(loc="upper left")
    return figure
