"""Translates vLLM's settings for this model, and `min_tokens`, to `canvas` and sampling parameters."""

from __future__ import annotations

from typing import Any

from canvasrt.containers.openai.body import Sampling
from canvasrt.containers.openai.errors import bad_request

# The sampler's parameters → vLLM's names.
_SAME = {
    "max_denoising_steps": "diffusion_max_steps",
    "canvas_length": "diffusion_canvas_length",
}


def sampling_of(request: Sampling) -> tuple[dict[str, int], dict[str, str]]:
    """Return the sampling parameters that the request gives by vLLM's names, and those names. Our own names take
    precedence."""
    found = {
        name: value
        for name, theirs in _SAME.items()
        if getattr(request, name) is None and (value := _of(request, theirs)) is not None
    }
    return found, {name: _SAME[name] for name in found}


def canvas_of(request: Sampling) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the model's `canvas`, and the caller's names of fields that came from vLLM's settings.

    Raises ApiError for a pin without a seed token, and for `canvas` together with vLLM's settings.
    """
    canvas, names = dict(request.canvas or {}), {}
    seed, pinned = (_of(request, f"diffusion_{name}") for name in ("seed_canvas", "pinned"))
    if seed is not None:
        if canvas:
            raise _wrong(
                "diffusion_seed_canvas", "cannot be combined with canvas: send one of them"
            )
        names["canvas"] = "diffusion_seed_canvas"
        canvas = {"seed": seed}
    if pinned:
        if far := [each for each in pinned if each >= len(seed or ())]:
            why = f"names position {far[0]}, which diffusion_seed_canvas does not have"
            raise _wrong("diffusion_pinned", why)
        canvas["pin"] = {str(each): seed[each] for each in pinned}
    if request.min_tokens:
        names = {"canvas": "min_tokens"} | names if not canvas else names
        names["canvas.least"] = "min_tokens"
        canvas["least"] = request.min_tokens
    return canvas, names


def _of(request: Sampling, name: str) -> Any:
    """Return one of vLLM's settings, from the request or its `vllm_xargs`."""
    given = getattr(request, name)
    return getattr(request.vllm_xargs, name, None) if given is None else given


def _wrong(path: str, what: str) -> Exception:
    return bad_request(f"{path} {what}.", path, "invalid_value")
