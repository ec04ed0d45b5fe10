"""The figures of a load test as one self-contained page: tables and inline plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from canvasrt.containers.load.measure import COMPARED, LatencySpread, LoadSummary, Round
from canvasrt.pages import render_page, section
from canvasrt.pages.drawing import OURS, THEIRS, drawing, figure_of
from canvasrt.types import Json

_COLOURS = (OURS, THEIRS)
LATENCY_HEADS = ("ms", "p50", "p90", "p99", "mean", "sd", "least", "most")
_SERIES = {
    "first": "first text",
    "gap": "between pieces",
    "total": "whole answer",
}


def spread_rows(summaries: Mapping[str, LoadSummary]) -> list[list[str]]:
    """Return a row per series and server, in milliseconds."""
    rows = []
    for name, label in _SERIES.items():
        for server, summary in summaries.items():
            spread: LatencySpread | None = getattr(summary, name)
            if spread is not None:
                numbers = (spread.p50, spread.p90, spread.p99, spread.mean, spread.deviation)
                shown = [f"{each:,.1f}" for each in (*numbers, spread.least, spread.most)]
                rows.append([f"{label}, {server}" if len(summaries) > 1 else label, *shown])
    return rows


def rate_rows(summaries: Mapping[str, LoadSummary]) -> list[list[str]]:
    """Return a row per server: how much it answered."""
    rows = []
    for server, each in summaries.items():
        tokens = f"{each.tokens_per_second:,.1f}" + ("" if each.tokens_counted else " (pieces)")
        steps = "–" if each.steps is None else f"{each.steps:.1f}"
        passes = "–" if each.tokens_per_pass is None else f"{each.tokens_per_pass:.2f}"
        errors = sum(each.errors.values())
        rows.append(
            [
                server,
                f"{each.calls}",
                f"{errors}",
                f"{each.calls_per_second:.2f}",
                tokens,
                steps,
                passes,
            ]
        )
    return rows


RATE_HEADS = ("", "calls", "errors", "calls/s", "tokens/s", "steps per answer", "tokens per pass")
RATIO_HEADS = ("", "ratio", "lowest round", "highest round", "better is")


def ratio_rows(ratios: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Return a row per measure."""
    return [
        [
            COMPARED[name][0],
            *(f"{each:.2f}" for each in values),
            "less" if COMPARED[name][1] else "more",
        ]
        for name, values in ratios.items()
    ]


def error_rows(summaries: Mapping[str, LoadSummary]) -> list[list[str]]:
    """Return a row per server and kind of error."""
    return [
        [server, kind, str(count)]
        for server, each in summaries.items()
        for kind, count in each.errors.items()
    ]


def load_page(
    rounds: Mapping[str, Sequence[Round]],
    summaries: Mapping[str, LoadSummary],
    ratios: Mapping[str, Sequence[float]],
    settings: Json,
) -> str:
    """Return the page as HTML. CanvasError if matplotlib is not installed."""
    sections = [
        section("Throughput", "", _throughput(rounds), [(RATE_HEADS, rate_rows(summaries))]),
        section(
            "Latency",
            "Milliseconds. First text and whole answer count from when a call was due.",
            _latency(rounds),
            [(LATENCY_HEADS, spread_rows(summaries))],
            empty="No call succeeded.",
        ),
        section("Over time", "Each point is a call.", _timeline(rounds)),
    ]
    if ratios:
        servers = " over ".join(summaries)
        sections.insert(0, section("Ratios", servers, tables=[(RATIO_HEADS, ratio_rows(ratios))]))
    if errors := error_rows(summaries):
        sections.append(section("Errors", tables=[(("", "what", "calls"), errors)]))
    failed = sum(sum(each.errors.values()) for each in summaries.values())
    calls = sum(each.calls for each in summaries.values())
    return render_page(
        "Load test",
        [" against ".join(summaries), settings_line(settings)],
        sections,
        "Written by canvasrt bench.",
        {"ok": not failed, "text": f"{calls - failed} of {calls} calls answered"},
    )


def settings_line(settings: Json) -> str:
    """Return the settings as one line."""
    arrival = "" if settings["rate"] is None else f", {settings['rate']:g} arriving per second"
    return (
        f"{settings['prompts']}: {settings['sessions']} sessions per round, {settings['rounds']} rounds,"
        f" {settings['concurrency']} at a time{arrival}, at most {settings['max_tokens']} tokens"
    )


def _throughput(rounds: Mapping[str, Sequence[Round]]) -> str:
    def draw() -> Any:
        figure, axes = figure_of(2.5)
        width = 0.8 / len(rounds)
        for number, (server, taken) in enumerate(rounds.items()):
            rates = [LoadSummary.of([each]).tokens_per_second for each in taken]
            places = np.arange(len(taken)) + 1 + (number - (len(rounds) - 1) / 2) * width
            axes.bar(places, rates, 0.92 * width, color=_COLOURS[number], label=server)
        axes.set_xticks(range(1, 1 + max(map(len, rounds.values()))))
        axes.set_xlabel("round")
        axes.set_ylabel("tokens per second")
        axes.grid(axis="y")
        _legend(axes, rounds)
        return figure

    return drawing("throughput", "Tokens per second of each round", draw)


def _latency(rounds: Mapping[str, Sequence[Round]]) -> str:
    def draw() -> Any:
        figure, pair = figure_of(2.9, columns=2)
        for axes, name in zip(pair, ("first", "total"), strict=True):
            for number, (server, taken) in enumerate(rounds.items()):
                values = sorted(1e3 * getattr(call, name) for call in _good(taken, name))
                shares = 100 * (np.arange(len(values)) + 1) / max(1, len(values))
                axes.step(values, shares, where="post", color=_COLOURS[number], label=server)
            axes.set_xlabel(f"{_SERIES[name]}, ms")
            axes.set_ylim(0, 103)
            axes.set_xlim(left=0)
            axes.grid()
        pair[0].set_ylabel("calls within, %")
        _legend(pair[1], rounds, "lower right")
        return figure

    return drawing("latency", "Share of calls by latency", draw)


def _timeline(rounds: Mapping[str, Sequence[Round]]) -> str:
    def draw() -> Any:
        figure, axes = figure_of(2.6)
        for number, (server, taken) in enumerate(rounds.items()):
            origin = min(each.start for each in taken)
            points = [(call.due - origin, 1e3 * call.total) for call in _good(taken, "total")]
            axes.plot(
                *zip(*points, strict=True) if points else ((), ()),
                ".",
                color=_COLOURS[number],
                label=server,
            )
        axes.set_xlabel("due, s after the server's first round began")
        axes.set_ylabel("whole answer, ms")
        axes.set_ylim(bottom=0)
        axes.grid()
        _legend(axes, rounds)
        return figure

    return drawing("timeline", "Latency of each call by its scheduled start", draw)


def _good(taken: Sequence[Round], name: str) -> list[Any]:
    calls = (call for each in taken for call in each.calls)
    return [call for call in calls if not call.error and getattr(call, name) is not None]


def _legend(axes: Any, rounds: Mapping[str, Any], where: str = "best") -> None:
    if len(rounds) > 1:
        axes.legend(loc=where)
