"""The sections of a quality report, for its page and the terminal: notes and tables made from the report's JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from canvasrt.fidelity.reliability import reliability_sections
from canvasrt.pages import section, table_of
from canvasrt.types import Json

# The sections that the terminal also shows.
BRIEF = (
    *("Limits", "Denoising steps", "Exact answers", "Pace"),
    *("Layers, worst first", "Experts, worst first"),
)


def sections(report: Json, drawn: Mapping[str, str] = MappingProxyType({})) -> Iterator[Json]:
    """Yield the sections of a report, including the plots in `drawn`."""
    yield section("Limits", tables=[_limits(report)], empty="The recipe sets no limits.")
    yield section("Denoising steps", _steps_note(report), drawn.get("steps"), [_steps(report)])
    if report["answers"]:
        yield section(
            "Exact answers",
            "Both sides answer the same held-out questions with the same noise. Intervals are 95% intervals: Wilson's for"
            " each side, and Agresti and Min's paired interval for the loss. If a task has too few questions, they are"
            " asked again with other noise.",
            drawn.get("answers"),
            [_answers(report["answers"])],
            last_is_total=True,
        )
    if report.get("decisions"):
        yield from reliability_sections(report["decisions"], drawn)
    if report["pace"]:
        yield section(
            "Pace",
            "Whole generations with early stop, with the same noise on both sides. The growth's interval is a bootstrap"
            f" over the {report['pace']['requests']:,} requests.",
            drawn.get("pace"),
            [_pace(report)],
        )
    if report["segments"]:
        yield from _inside(report, drawn)


def _inside(report: Json, drawn: Mapping[str, str]) -> Iterator[Json]:
    """Yield the sections about segments, layers, experts and matrices."""
    yield section(
        "Segments",
        "Each segment and each layer gets the inputs that transformers computed, so errors do not add up."
        " The table shows ‖found − expected‖ / ‖expected‖ while denoising, and in brackets while encoding."
        " For the head, hidden states are the next step's input.",
        drawn.get("segments"),
        [_segments(report)],
    )
    worst = report["worst"]
    layers = {
        "layer": lambda each: each["layer"],
        "attention": lambda each: each["kind"],
        "encode": lambda each: small(each["encode"]),
        "denoise": lambda each: small(each["denoise"]),
    }
    tables = [table_of(worst["layers"], layers)]
    yield section("Layers, worst first", "", drawn.get("layers"), tables, empty="No losses.")
    experts = {
        "layer": lambda each: each["layer"],
        "expert": lambda each: each["expert"],
        "output": lambda each: small(each["output"]),
        "gate and up": lambda each: small(each["gate_up"]),
        "down": lambda each: small(each["down"]),
        "tokens": lambda each: f"{each['tokens']:,}",
    }
    yield section(
        "Experts, worst first",
        "Relative errors of the weights, and of each expert's output. The output is computed with the bundle's weights"
        " from the tokens that transformers routed to the expert. Its inputs are not rounded.",
        drawn.get("experts"),
        [table_of(worst["experts"], experts)],
        empty="No losses.",
    )
    matrices = {
        "matrix": lambda each: each["name"],
        "format": lambda each: each["format"] or "",
        "relative error": lambda each: small(each["error"]),
    }
    tables = [table_of(worst["weights"], matrices)]
    yield section("Matrices, worst first", tables=tables, empty="No losses.")


def verdict(report: Json) -> str:
    """Return the verdict in one sentence."""
    if not report["ok"]:
        return "Outside its limits."
    missing = [each["what"] for each in report["limits"] if each["measured"] is None]
    return f"Within its limits{'; not measured: ' + ', '.join(missing) if missing else ''}."


def subject(report: Json) -> str:
    """Return a text that says which bundle was compared."""
    recipe = f"Recipe {report['recipe']}" if report["recipe"] else str(report["precision"])
    return f"{recipe}, target {report['target'] or 'none'}, bundle {report['bundle'][:12]}."


def versions(report: Json) -> str:
    """Return the versions of the packages that made the report."""
    return ", ".join(f"{name} {version}" for name, version in report["versions"].items())


def small(value: float | None) -> str:
    """Format a number that can be tiny."""
    if value is None:
        return "–"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    return f"{value:.4f}" if 1e-3 <= value < 1000 else f"{value:.1e}"


def _limits(report: Json) -> Any:
    """Return the table of limits: each limit, its measurement, and whether the limit holds."""

    def held(each: Json) -> str:
        return "not measured" if each["measured"] is None else "ok" if each["ok"] else "exceeded"

    columns = {
        "": lambda each: each["what"] + (f": {each['where']}" if each["where"] else ""),
        "measured": lambda each: _number(each["name"], each["measured"]),
        "limit": lambda each: (
            ("at least " if each["at_least"] else "at most ") + _number(each["name"], each["limit"])
        ),
        " ": held,
    }
    return table_of(report["limits"], columns)


def _steps(report: Json) -> Any:
    """Return the table of numbers for all steps, and for each third of the steps."""
    steps = report["steps"]
    columns = {
        "steps": lambda part: part[0],
        "mean KL, nats": lambda part: small(part[1]["kl_mean"]),
        "99th percentile": lambda part: small(part[1]["kl_p99"]),
        "same best token": lambda part: f"{part[1]['argmax_agreement']:.2%}",
        "entropy error, nats": lambda part: small(part[1]["entropy_error_mean"]),
    }
    return table_of([("all", steps["all"]), *steps["by_phase"].items()], columns)


def _steps_note(report: Json) -> str:
    """Return a note that says how steps were compared."""
    steps = report["steps"]
    kinds = {
        "questions": "held-out questions of the demo",
        "texts": "short texts",
        "random": "prompts of random tokens",
    }
    return (
        f"{steps['prompts']} {kinds[steps['prompt_kind']]}, {steps['steps']} steps each without early stop,"
        f" {steps['all']['positions']:,} positions. Both sides get the canvases that transformers went through in fp32, and"
        " self-condition on their own previous step. KL(transformers ‖ bundle) compares soft-capped logits at"
        " temperature 1. Early, middle and late are thirds of the steps."
    )


def _answers(answers: Json) -> Any:
    """Return the table of answers to each task, and to all tasks together."""

    def share(side: Json) -> str:
        low, high = side["interval"]
        return f"{100 * side['share']:.1f} ({100 * low:.1f} to {100 * high:.1f})"

    def loss(part: Json) -> str:
        low, high = part["loss_interval"]
        return f"{100 * part['loss']:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"

    columns = {
        "task": lambda part: part["task"],
        "asked": lambda part: f"{part['asked']:,}",
        "bundle, %": lambda part: share(part["bundle"]),
        "transformers, %": lambda part: share(part["reference"]),
        "lost": lambda part: part["lost"],
        "gained": lambda part: part["gained"],
        "loss per 100 answers": loss,
    }
    return table_of([*answers["tasks"], {"task": "all", **answers["all"]}], columns)


def _pace(report: Json) -> Any:
    """Return the table of steps per block, for each task and for all tasks, and of tokens per pass."""

    def growth(pace: Json) -> str:
        low, high = pace["steps_growth_interval"]
        return f"{pace['steps_growth']:+.1%} ({low:+.1%} to {high:+.1%})"

    tasks = report["answers"]["tasks"] if report["answers"] else []
    parts = [(f"{part['task']}: steps per block", part["pace"]) for part in tasks]
    parts.append(("all: steps per block" if tasks else "steps per block", report["pace"]))
    columns = {
        "": lambda part: part[0],
        "bundle": lambda part: f"{part[1]['bundle']['steps_per_block']:.3f}",
        "transformers": lambda part: f"{part[1]['reference']['steps_per_block']:.3f}",
        "growth": lambda part: growth(part[1]),
    }
    heads, rows = table_of(parts, columns)
    tokens = [f"{report['pace'][side]['tokens_per_pass']:.3f}" for side in ("bundle", "reference")]
    return heads, [*rows, ["new tokens per denoising pass", *tokens, ""]]


def _segments(report: Json) -> Any:
    """Return the table of each segment's relative errors: while denoising and, in brackets, while encoding."""

    def both(output: str) -> Any:
        return lambda each: f"{small(each[output]['denoise'])} ({small(each[output]['encode'])})"

    columns = {
        "segment": lambda each: each["name"],
        "layers": lambda each: f"{each['layers'][0]} to {each['layers'][-1]}",
        "hidden states": both("hidden_out"),
        "keys": both("keys"),
        "values": both("values"),
        "logits": lambda each: "",
    }
    heads, rows = table_of(report["segments"], columns)
    head = report["head"]
    return heads, [
        *rows,
        ["head", "", small(head["next_hidden"]), "", "", small(head["logits"])],
    ]


def _number(name: str, value: float | None) -> str:
    """Format a measurement as its name requires."""
    if value is None:
        return "–"
    if name == "argmax_agreement":
        return f"{value:.2%}"
    if name == "steps_growth":
        return f"{value:.1%}"
    return f"{value:g}" if name == "answers_lost" else small(value)
