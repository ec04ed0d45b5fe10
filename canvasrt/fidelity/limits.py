"""The limits on how much a bundle may differ from its reference, and the check of these limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from canvasrt.formats import weight_limits
from canvasrt.types import Json

# Limits for fp32 graphs, which differ from the reference only in the order of sums.
FP32 = {
    "argmax_agreement": 0.999,
    "entropy_error_mean": 1e-3,
    "kl_mean": 1e-6,
    "layer_error": 1e-4,
}
# Limits for bf16. For comparison: on the demo, transformers in bfloat16 has the same best token as in fp32 at 99.9% of
# positions, and its mean divergence is 1e-5.
BF16 = {"argmax_agreement": 0.99, "entropy_error_mean": 5e-3, "kl_mean": 1e-3}
LIMIT_NAMES = {
    "answers_lost": "right answers lost per 100",
    "steps_growth": "more steps per block",
    "kl_mean": "mean KL divergence, nats",
    "kl_p99": "KL divergence, 99th percentile, nats",
    "argmax_agreement": "same best token",
    "entropy_error_mean": "mean error of the entropy, nats",
    "layer_error": "worst layer, relative error",
}
# Measurements that have a lower limit; all others have an upper limit.
AT_LEAST = ("argmax_agreement",)


def limits_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the limits of a bundle with these options: the recipe's limits or, without a recipe, the limits for the
    precision."""
    recipe = options.get("recipe")
    if recipe:
        given = recipe.get("limits") or {}
        return {name: given[name] for name in LIMIT_NAMES if given.get(name) is not None}
    return dict(BF16 if options.get("precision") == "bf16" else FP32)


def check_limits(limits: Mapping[str, float], report: Json) -> list[Json]:
    """Check the report against `limits`, and against the limits on weights' errors. A measurement that this run could
    not make is None, and meets its limit; NaN exceeds its limit."""
    overall = report["steps"]["all"]
    answers, pace, layers = (report.get(name) for name in ("answers", "pace", "layers"))
    where: dict[str, str] = {}
    measured: dict[str, float | None] = {
        **{name: overall[name] for name in LIMIT_NAMES if name in overall},
        "answers_lost": 100 * answers["all"]["loss"] if answers else None,
        "steps_growth": pace["steps_growth"] if pace else None,
        "layer_error": None,
    }
    if layers:
        worst = max(layers, key=_layer_error)
        measured["layer_error"] = _layer_error(worst)
        where["layer_error"] = f"layer {worst['layer']}"
    found = [
        _checked(name, LIMIT_NAMES[name], limit, measured[name], where.get(name))
        for name, limit in limits.items()
    ]
    return [*found, *_weights(report)]


def _checked(name: str, what: str, limit: float, measured: float | None, where: str | None) -> Json:
    at_least = name in AT_LEAST
    ok = measured is None or (measured >= limit if at_least else measured <= limit)
    found = {"name": name, "what": what, "limit": limit, "measured": measured, "where": where}
    return found | {"at_least": at_least, "ok": ok}


def _layer_error(layer: Json) -> float:
    return max(layer["encode"], layer["denoise"])


def _weights(report: Json) -> Iterator[Json]:
    """Yield a check of each format's worst matrix. Each expert in a stack counts as a matrix."""
    matrices = report.get("weights") or []
    kinds = {each["name"]: "kept" if each["kept"] else each["format"] for each in matrices}
    errors = [(each["error"], each["name"]) for each in matrices if ".experts." not in each["name"]]
    for each in report.get("experts") or []:
        for part in ("gate_up", "down"):
            errors.append(
                (each[part], f"layers.{each['layer']}.experts.{part}, expert {each['expert']}")
            )
    limits = weight_limits()
    for kind, limit in {**limits, "kept": limits[None]}.items():
        held = [(error, name) for error, name in errors if kinds[name.partition(",")[0]] == kind]
        if held:
            error, name = max(held)
            where = name if error else None
            yield _checked(f"weight_error_{kind or 'others'}", _what(kind), limit, error, where)


def _what(kind: str | None) -> str:
    """Return a text that says which matrices a limit is for: those in one format, those that keep the checkpoint's
    codes, or unquantized matrices."""
    if kind == "kept":
        return "worst matrix that keeps the checkpoint's codes, relative error"
    return f"worst {kind.upper() if kind else 'unquantized'} matrix, relative error"
