"""The figures of a load test as one self-contained page: tables and inline plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from canvasrt.containers.load.measure import COMPARED, LoadSummary, Round
from canvasrt.pages import render_page, section, table_of
from canvasrt.pages.drawing import OURS, THEIRS, bars, drawing, figure_of
from canvasrt.types import Json

_COLOURS = (OURS, THEIRS)
_SERIES = {
    "first": "first text",
    "gap": "between pieces",
    "total": "whole answer",
}


def sections(
    summaries: Mapping[str, LoadSummary],
    ratios: Mapping[str, Sequence[float]],
    drawn: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Json]:
    """Yield the sections of results for the page and the terminal. `drawn` holds the plots of the sections, if any."""
    if ratios:
        yield section("Ratios", " over ".join(summaries), tables=[_ratios(ratios)])
    yield section("Throughput", "", drawn.get("throughput"), [_rates(summaries)])
    note = "Milliseconds. First text and whole answer are measured from the call's scheduled start."
    tables = [_latencies(summaries)]
    yield section("Latency", note, drawn.get("latency"), tables, empty="No call succeeded.")
    if drawn:
        yield section("Over time", "Each point is a call.", drawn["timeline"])
    kinds = [(name, *error) for name, each in summaries.items() for error in each.errors.items()]
    if kinds:
        columns = {head: itemgetter(place) for place, head in enumerate(("", "error", "calls"))}
        yield section("Errors", tables=[table_of(kinds, columns)])


def _rates(summaries: Mapping[str, LoadSummary]) -> Any:
    """Return a table of calls, failures and rates; each server has a row."""

    def known(number: float | None, form: str) -> str:
        return "–" if number is None else format(number, form)

    columns: dict[str, Callable[[Any], Any]] = {
        "": lambda item: item[0],
        "calls": lambda item: item[1].calls,
        "errors": lambda item: sum(item[1].errors.values()),
        "calls/s": lambda item: f"{item[1].calls_per_second:.2f}",
        "tokens/s": lambda item: (
            f"{item[1].tokens_per_second:,.1f}" + ("" if item[1].tokens_counted else " (pieces)")
        ),
        "steps per answer": lambda item: known(item[1].steps, ".1f"),
        "tokens per pass": lambda item: known(item[1].tokens_per_pass, ".2f"),
    }
    return table_of(summaries.items(), columns)


def _latencies(summaries: Mapping[str, LoadSummary]) -> Any:
    """Return a table of latencies in milliseconds; each series of each server has a row."""
    spreads = {
        f"{label}, {server}" if len(summaries) > 1 else label: getattr(summary, name)
        for name, label in _SERIES.items()
        for server, summary in summaries.items()
    }
    heads = {"p50": "p50", "p90": "p90", "p99": "p99", "mean": "mean", "sd": "deviation"}
    heads |= {"least": "least", "most": "most"}
    numbers = {
        head: lambda item, name=name: f"{getattr(item[1], name):,.1f}"
        for head, name in heads.items()
    }
    known = [(label, spread) for label, spread in spreads.items() if spread is not None]
    return table_of(known, {"ms": itemgetter(0), **numbers})


def _ratios(ratios: Mapping[str, Sequence[float]]) -> Any:
    columns: dict[str, Callable[[Any], Any]] = {
        "": lambda item: COMPARED[item[0]][0],
        "ratio": lambda item: f"{item[1][0]:.2f}",
        "lowest round": lambda item: f"{item[1][1]:.2f}",
        "highest round": lambda item: f"{item[1][2]:.2f}",
        "better is": lambda item: "less" if COMPARED[item[0]][1] else "more",
    }
    return table_of(ratios.items(), columns)


def load_page(
    rounds: Mapping[str, Sequence[Round]],
    summaries: Mapping[str, LoadSummary],
    ratios: Mapping[str, Sequence[float]],
    settings: Json,
) -> str:
    """Return the page as HTML. Raises CanvasError if matplotlib is not installed."""
    drawn = {
        name: drawing(name, about, draw, rounds)
        for name, about, draw in (
            ("throughput", "Tokens per second of each round", _throughput),
            ("latency", "Share of calls by latency", _latency),
            ("timeline", "Latency of each call by its scheduled start", _timeline),
        )
    }
    failed = sum(sum(each.errors.values()) for each in summaries.values())
    calls = sum(each.calls for each in summaries.values())
    return render_page(
        "Load test",
        [" against ".join(summaries), settings_line(settings)],
        list(sections(summaries, ratios, drawn)),
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


def _throughput(rounds: Mapping[str, Sequence[Round]]) -> Any:
    numbers = [str(n) for n in range(1, 1 + max(map(len, rounds.values())))]
    series = [
        (server, colour, [LoadSummary.of([each]).tokens_per_second for each in taken])
        for colour, (server, taken) in zip(_COLOURS, rounds.items(), strict=False)
    ]
    return bars(numbers, series, "{:,.0f}", "tokens per second", "round")


def _latency(rounds: Mapping[str, Sequence[Round]]) -> Any:
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


def _timeline(rounds: Mapping[str, Sequence[Round]]) -> Any:
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
    axes.set_xlabel("scheduled start, s after the server's first round began")
    axes.set_ylabel("whole answer, ms")
    axes.set_ylim(bottom=0)
    axes.grid()
    _legend(axes, rounds)
    return figure


def _good(taken: Sequence[Round], name: str) -> list[Any]:
    calls = (call for each in taken for call in each.calls)
    return [call for call in calls if not call.error and getattr(call, name) is not None]


def _legend(axes: Any, rounds: Mapping[str, Any], where: str = "best") -> None:
    if len(rounds) > 1:
        axes.legend(loc=where)
