"""Translates vLLM's settings for this model to `canvas`, sampling parameters and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from canvasrt.containers.openai.body import Sampling
from canvasrt.containers.openai.errors import bad_request, leading
from canvasrt.runtime.conditions import MAX_ALLOWED
from canvasrt.types import Json

# The sampler's parameters → vLLM's names.
_SAME = {
    "max_denoising_steps": "diffusion_max_steps",
    "canvas_length": "diffusion_canvas_length",
}


def sampling_of(request: Sampling) -> tuple[dict[str, int], dict[str, str]]:
    """Return the sampling parameters that the request sets under vLLM's names, and a map from our names to vLLM's. A
    parameter that is also set under our name is left out."""
    found = {
        name: value
        for name, theirs in _SAME.items()
        if getattr(request, name) is None and (value := _of(request, theirs)) is not None
    }
    return found, {name: _SAME[name] for name in found}


def canvas_of(request: Sampling) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the model's `canvas`, and a map from patterns of its fields to the settings of vLLM that they came from.

    Raises ApiError for wrong settings, such as a pin without a seed token, or a seed together with `canvas`.
    """
    canvas, names = dict(request.canvas or {}), {}
    seed, pinned = (_of(request, f"diffusion_{name}") for name in ("seed_canvas", "pinned"))
    if seed is not None:
        if canvas:
            raise _wrong(
                "diffusion_seed_canvas", "cannot be combined with canvas: send one of them"
            )
        names[leading("canvas")] = "diffusion_seed_canvas"
        canvas = {"seed": seed}
    if pinned:
        if far := [each for each in pinned if each >= len(seed or ())]:
            why = f"names position {far[0]}, which diffusion_seed_canvas does not have"
            raise _wrong("diffusion_pinned", why)
        canvas["pin"] = {str(each): seed[each] for each in pinned}
    if _of(request, "diffusion_constrained"):
        if not (tokens := request.logprob_token_ids):
            raise _wrong("diffusion_constrained", "needs logprob_token_ids, the allowed tokens")
        width = _width(request, "diffusion_constrained")
        if (count := width * len(tokens)) > MAX_ALLOWED:
            why = f"allows {count} tokens, {len(tokens)} at each of {width} positions; at most {MAX_ALLOWED}"
            raise _wrong("diffusion_constrained", f"{why} are allowed together")
        free = set(range(width)) - set(pinned or ())
        canvas["allow"] = {str(each): tokens for each in sorted(free)}
    if request.min_tokens:
        if not canvas:
            names.setdefault(leading("canvas"), "min_tokens")
        names = {leading("canvas.least"): "min_tokens"} | names
        canvas["least"] = request.min_tokens
    return canvas, names


def read_of(request: Sampling) -> dict[str, Any]:
    """Return the options of a read, which runs all steps of one canvas and returns every token. If
    `diffusion_read_only` is not set, return no options. Raises ApiError if the length of the canvas is unknown."""
    if not _of(request, "diffusion_read_only"):
        return {}
    width = _width(request, "diffusion_read_only")
    budget = min(request.token_budget[1] or width, width)
    return {"ignore_eos": True, "early_stop": False, "max_new_tokens": budget}


def vllm_scores(request: Any, scores: list[Json]) -> list[Json]:
    """Change and return log-probabilities as vLLM's settings require: texts can become token ids, and the
    log-probabilities of a constrained read are normalized over the allowed tokens."""
    allowed = set(request.logprob_token_ids or ()) if _of(request, "diffusion_constrained") else ()
    for each in scores:
        shown = [each, *each["top"]]
        read = each["token_id"] in allowed  # false for a pinned token
        among = [other["logprob"] for other in each["top"] if read and other["token_id"] in allowed]
        total = math.log(sum(map(math.exp, among))) if among else 0.0
        for other in shown:
            if among:
                other["logprob"] -= total
            if request.return_tokens_as_token_ids:
                other.setdefault("bytes", list(other["text"].encode()))
                other["text"] = f"token_id:{other['token_id']}"
    return scores


def _width(request: Sampling, name: str) -> int:
    """Return the canvas length that a request sets. If it sets none, raises ApiError, because `name` needs a length."""
    seed: Sequence[int] = _of(request, "diffusion_seed_canvas") or ()
    lengths = (_of(request, each) for each in ("canvas_length", "diffusion_canvas_length"))
    width: int = next((each for each in lengths if each and each > 0), len(seed))
    if width <= 0:
        raise _wrong(name, "needs diffusion_seed_canvas")
    return width


def _of(request: Sampling, name: str) -> Any:
    """Return one of vLLM's settings, from the request or its `vllm_xargs`."""
    given = getattr(request, name)
    return getattr(request.vllm_xargs, name, None) if given is None else given


def _wrong(path: str, what: str) -> Exception:
    return bad_request(f"{path} {what}.", path, "invalid_value")
