"""`canvasrt bench URL`: measures servers under load."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from canvasrt.cli.bench_options import LoadOptions
from canvasrt.console import emit, progress, show_section
from canvasrt.containers.client.openai import KEY_VARIABLE
from canvasrt.containers.load import load_page as shown
from canvasrt.containers.load.calls import Endpoint, first_model, root_of
from canvasrt.containers.load.measure import Load, LoadSummary, ratios, take_turns
from canvasrt.containers.load.sessions import SETS, Session, built_in, from_file
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require

AGAINST_KEY_VARIABLE = "CANVASRT_AGAINST_API_KEY"


def measure_servers(url: str, against: str | None, count: int, options: LoadOptions) -> None:
    """Measure one server, or two alternately, in `count` rounds, and print the figures."""
    sessions = _sessions(options.prompts, options.sessions)
    endpoints = _endpoints(url, against, options)
    if options.report is not None:  # fail before the measurement, not after it
        require("matplotlib", "report")
        options.report.mkdir(parents=True, exist_ok=True)
    with progress():
        load = Load(options.concurrency, options.rate)
        taken = take_turns(endpoints, sessions, load, count)
    names = [each.url for each in endpoints]
    rounds = dict(zip(names, taken, strict=True))
    summaries = {name: LoadSummary.of(each) for name, each in rounds.items()}
    compared = ratios(*taken) if len(taken) == 2 else {}
    settings = {
        "prompts": options.prompts,
        "sessions": options.sessions,
        "rounds": count,
        "concurrency": options.concurrency,
        "rate": options.rate,
        "max_tokens": options.max_tokens,
        "models": [each.model for each in endpoints],
    }
    data = {
        "settings": settings,
        "servers": {name: each.to_json() for name, each in summaries.items()},
        "ratios": compared,
    }

    def draw(console: Console) -> None:
        console.print(shown.settings_line(settings))
        for each in shown.sections(summaries, compared):
            show_section(console, each)
        if options.report is not None:
            console.print(f"{options.report / 'bench.html'}")

    try:
        emit(data, draw)
    finally:  # even if nobody reads the output
        if options.report is not None:
            text = shown.load_page(rounds, summaries, compared, settings)
            (options.report / "bench.html").write_text(text, encoding="utf-8")
            (options.report / "bench.json").write_text(json.dumps(data, indent=2), encoding="utf-8")
    for name, summary in summaries.items():
        if sum(summary.errors.values()) == summary.calls:
            often = max(summary.errors, key=lambda error: summary.errors[error])
            raise CanvasError(
                f"{name} answered none of {summary.calls} calls: {often}",
                "see the server's log, or lower the load with --concurrency and --rate",
            )


def _sessions(prompts: str, count: int) -> list[Session]:
    if prompts in SETS:
        return built_in(prompts, count)
    if not Path(prompts).is_file():
        raise UsageError(
            f"--prompts {prompts} is neither a file nor a set",
            f"give a file, or one of {', '.join(SETS)}",
        )
    return from_file(Path(prompts), count)


def _endpoints(url: str, against: str | None, options: LoadOptions) -> Sequence[Endpoint]:
    sides = [(url, KEY_VARIABLE)]
    if against is not None:
        sides.append((against, AGAINST_KEY_VARIABLE))
    if len({root_of(each) for each, _ in sides}) < len(sides):
        raise UsageError(f"--against is {url} itself", "give another server")
    found = []
    for each, variable in sides:
        key = os.environ.get(variable, "")
        model = options.model if options.model and each == url else first_model(each, key)
        found.append(Endpoint(each, model, key, options.timeout, options.max_tokens))
    return found
