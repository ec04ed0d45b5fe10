"""The quality report as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from canvasrt.fidelity.reliability import reliability_lines
from canvasrt.types import Json

STEP_HEADS = (
    "steps",
    "mean KL, nats",
    "99th percentile",
    "same best token",
    "entropy error, nats",
)
ANSWER_HEADS = (
    "task",
    "asked",
    "bundle, %",
    "transformers, %",
    "lost",
    "gained",
    "loss per 100 answers",
)
PACE_HEADS = ("", "bundle", "transformers", "growth")
SEGMENT_HEADS = ("segment", "layers", "hidden states", "keys", "values", "logits")
LAYER_HEADS = ("layer", "attention", "encode", "denoise")
EXPERT_HEADS = ("layer", "expert", "output", "gate and up", "down", "tokens")
WEIGHT_HEADS = ("matrix", "format", "relative error")


def markdown(report: Json, title: str) -> str:
    """Return the report as tables, with the verdict first."""
    return "\n".join(_lines(report, title)) + "\n"


def _lines(report: Json, title: str) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield f"# {title}"
    yield ""
    yield f"**{verdict(report)}** {subject(report)} ({versions})"
    if report["limits"]:
        yield from _section("Limits", "", ("", "measured", "limit", ""), limit_rows(report))
    yield from _section("Denoising steps", steps_note(report), STEP_HEADS, step_rows(report))
    if report["answers"]:
        rows = answer_rows(report)
        yield from _section("Exact answers", answers_note(report), ANSWER_HEADS, rows)
    if report.get("decisions"):
        yield from reliability_lines(report["decisions"])
    if report["pace"]:
        yield from _section("Pace", pace_note(report), PACE_HEADS, pace_rows(report))
    if report["segments"]:
        yield from _section("Segments", parts_note(report), SEGMENT_HEADS, segment_rows(report))
        yield from _section("Layers, worst first", "", LAYER_HEADS, layer_rows(report))
        rows = expert_rows(report)
        yield from _section("Experts, worst first", experts_note(report), EXPERT_HEADS, rows)
        yield from _section("Matrices, worst first", "", WEIGHT_HEADS, weight_rows(report))


def _section(
    title: str, note: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    if note:
        yield from (note, "")
    if not rows:
        yield "No losses."
        return
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def verdict(report: Json) -> str:
    """Return the verdict in one sentence."""
    if not report["ok"]:
        return "Outside its limits."
    missing = [each["what"] for each in report["limits"] if each["measured"] is None]
    return f"Within its limits{'; not measured: ' + ', '.join(missing) if missing else ''}."


def subject(report: Json) -> str:
    """Return what was compared."""
    recipe = f"Recipe {report['recipe']}" if report["recipe"] else str(report["precision"])
    return f"{recipe}, target {report['target'] or 'none'}, bundle {report['bundle'][:12]}."


def limit_rows(report: Json) -> list[list[str]]:
    """Return each limit, the measurement, and whether it holds."""
    return [
        [
            each["what"] + (f": {each['where']}" if each["where"] else ""),
            number(each["name"], each["measured"]),
            ("at least " if each["at_least"] else "at most ") + number(each["name"], each["limit"]),
            "not measured" if each["measured"] is None else "ok" if each["ok"] else "**exceeded**",
        ]
        for each in report["limits"]
    ]


def step_rows(report: Json) -> list[list[str]]:
    """Return the rows for all steps and for each third of them."""
    steps = report["steps"]
    return [
        [
            name,
            small(part["kl_mean"]),
            small(part["kl_p99"]),
            f"{part['argmax_agreement']:.2%}",
            small(part["entropy_error_mean"]),
        ]
        for name, part in (("all", steps["all"]), *steps["by_phase"].items())
    ]


def pace_rows(report: Json) -> list[list[str]]:
    """Return steps per block, also by task, and tokens per pass."""
    pace = report["pace"]
    if not pace:
        return []
    rows = []
    if report["answers"]:
        rows = [
            _pace_row(f"{part['task']}: steps per block", part["pace"])
            for part in report["answers"]["tasks"]
        ]
    tokens = [f"{pace[side]['tokens_per_pass']:.3f}" for side in ("bundle", "reference")]
    return [
        *rows,
        _pace_row("all: steps per block" if rows else "steps per block", pace),
        ["new tokens per denoising pass", *tokens, ""],
    ]


def _pace_row(name: str, pace: Json) -> list[str]:
    low, high = pace["steps_growth_interval"]
    return [
        name,
        *(f"{pace[side]['steps_per_block']:.3f}" for side in ("bundle", "reference")),
        f"{pace['steps_growth']:+.1%} ({low:+.1%} to {high:+.1%})",
    ]


def answer_rows(report: Json) -> list[list[str]]:
    """Return the rows for each task and for all of them."""
    answers = report["answers"]
    if not answers:
        return []
    rows = []
    for part in (*answers["tasks"], {"task": "all", **answers["all"]}):
        low, high = part["loss_interval"]
        rows.append(
            [
                part["task"],
                f"{part['asked']:,}",
                _share(part["bundle"]),
                _share(part["reference"]),
                str(part["lost"]),
                str(part["gained"]),
                f"{100 * part['loss']:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})",
            ]
        )
    return rows


def segment_rows(report: Json) -> list[list[str]]:
    """Return relative errors of each segment's outputs while denoising, and in brackets while encoding."""
    bodies = [
        [
            each["name"],
            f"{each['layers'][0]} to {each['layers'][-1]}",
            *(
                f"{small(each[output]['denoise'])} ({small(each[output]['encode'])})"
                for output in ("hidden_out", "keys", "values")
            ),
            "",
        ]
        for each in report["segments"]
    ]
    head = report["head"]
    return [*bodies, ["head", "", small(head["next_hidden"]), "", "", small(head["logits"])]]


def layer_rows(report: Json) -> list[list[str]]:
    """Return the layers that lose most."""
    if not report["worst"]:
        return []
    return [
        [str(each["layer"]), each["kind"], small(each["encode"]), small(each["denoise"])]
        for each in report["worst"]["layers"]
    ]


def expert_rows(report: Json) -> list[list[str]]:
    """Return the experts that lose most."""
    if not report["worst"]:
        return []
    return [
        [
            str(each["layer"]),
            str(each["expert"]),
            small(each["output"]),
            small(each["gate_up"]),
            small(each["down"]),
            f"{each['tokens']:,}",
        ]
        for each in report["worst"]["experts"]
    ]


def weight_rows(report: Json) -> list[list[str]]:
    """Return the matrices that lose most."""
    return [
        [each["name"], each["format"] or "", small(each["error"])]
        for each in report["worst"]["weights"]
    ]


def steps_note(report: Json) -> str:
    """Return how steps were compared."""
    steps = report["steps"]
    kinds = {
        "questions": "held-out questions of the demo",
        "texts": "short texts",
        "random": "prompts of random tokens",
    }
    return (
        f"{steps['prompts']} {kinds[steps['prompt_kind']]}, {steps['steps']} steps each without early stop,"
        f" {steps['all']['positions']:,} positions. Both sides get the canvases that transformers went through in fp32;"
        " each conditions on its own last step. KL(transformers ‖ bundle) is of the soft-capped logits at"
        " temperature 1. Early, middle and late are thirds of the steps."
    )


def answers_note(report: Json) -> str:
    """Return how answers were compared."""
    return (
        "Both sides answer the same held-out questions under the same noise. Intervals are 95%: Wilson's for each"
        " side, Agresti and Min's paired one for the loss. Tasks with too few questions repeat them under other"
        " noise."
    )


def pace_note(report: Json) -> str:
    """Return how the pace was compared."""
    return (
        "Whole generations with early stop, both sides under the same noise. The growth's interval is a bootstrap"
        f" over the {report['pace']['requests']:,} requests."
    )


def parts_note(report: Json) -> str:
    """Return how segments and layers were compared."""
    return (
        "Each segment, and below each layer, gets the inputs that transformers' got, so errors do not add up."
        " The table shows ‖found − expected‖ / ‖expected‖ while denoising, and in brackets while encoding."
        " The head's hidden states are the next step's input."
    )


def experts_note(report: Json) -> str:
    """Return how experts were compared."""
    return (
        "Relative errors of the weights, and of each expert's output. The output uses the bundle's weights and the"
        " tokens that transformers routed to the expert; its inputs are not rounded here."
    )


def number(name: str, value: float | None) -> str:
    """Format a measurement to suit its kind."""
    if value is None:
        return "–"
    if name == "argmax_agreement":
        return f"{value:.2%}"
    if name == "steps_growth":
        return f"{value:.1%}"
    return f"{value:g}" if name == "answers_lost" else small(value)


def small(value: float | None) -> str:
    """Format a number that may be tiny."""
    if value is None:
        return "–"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    return f"{value:.4f}" if 1e-3 <= value < 1000 else f"{value:.1e}"


def _share(side: Json) -> str:
    low, high = side["interval"]
    return f"{100 * side['share']:.1f} ({100 * low:.1f} to {100 * high:.1f})"
