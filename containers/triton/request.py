"""Reads a caller's tensors as a request for the runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from canvasrt.containers.tensors import (
    MAX_CANVAS,
    OPTIONS,
    check_stops,
    read_bias,
    read_inputs,
    read_object,
)
from canvasrt.containers.triton.decisions import read_decisions
from canvasrt.containers.triton.grammar import read_grammar
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.triton.prompt_encoder import PromptEncoder
from canvasrt.containers.triton.shared import Shared
from canvasrt.defaults import SOFT_TOKENS
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.infill import infill_request
from canvasrt.runtime.answers.layout import Ask, end_of_answer
from canvasrt.runtime.conditions import Conditions, read_conditions
from canvasrt.runtime.generator import Request, Work
from canvasrt.runtime.model import Model
from canvasrt.runtime.pictures import Picture, check_places, insert, read_pictures
from canvasrt.runtime.prefix import share_of
from canvasrt.runtime.sampling_params import SamplingParams

# The images of `n` answers are the same.
_seen = Shared[list[Picture]](
    16, 64 * 2**20, lambda pictures: sum(each.pixels.nbytes for each in pictures)
)


class ServedRequest(NamedTuple):
    """A request, and what only its replies depend on: whether to send drafts, the stop strings,
    whether to keep control tokens, how the prompt begins the answer, and the questions of a read."""

    request: Work
    drafts: bool
    stops: tuple[str, ...]
    control: bool = False
    opening: str = ""
    ask: Ask | None = None


def read_request(
    arrays: Mapping[str, np.ndarray],
    model: Model,
    encoder: PromptEncoder,
    options: ModelOptions,
    owner: str = "",
    answers: int = 1,
) -> ServedRequest:
    """Return a caller's request. CanvasError names the tensor that is wrong, or the operator's limit.

    `answers` are all those that the caller asks for together.
    """
    values = read_inputs(arrays)
    # Options before the prompt: checking them is cheap, encoding a long prompt is not.
    given = {tensor.name: values.get(tensor.name) for tensor in OPTIONS}
    if "logit_bias" in values:
        given["logit_bias"] = read_bias(values["logit_bias"])
    params = SamplingParams.from_defaults(model.sampler, model.config, **given)
    conditions = read_conditions_of(values)
    if "questions" in values:
        encoder.check(values)
        ask, read = read_decisions(
            values, model, encoder.tokenizer, _pictures(values, model, owner=owner)
        )
        read.check_limits(options.max_steps, options.max_passes)
        return ServedRequest(replace(read, owner=owner), False, (), ask=ask)
    if "infill" not in values:  # whose passes depend on its gaps
        params.check_limits(model.config, answers, options.max_steps, options.max_passes)
    stops = check_stops(values.get("stop") or ())
    if stops and encoder.tokenizer is None:
        raise CanvasError(
            "the model has no tokenizer, so it cannot find stop strings", "leave out stop"
        )
    encoded, opening = encoder.encode(values, owner)
    pictures = _pictures(values, model, encoded, owner)
    prompt: Sequence[int] | np.ndarray = encoded
    if pictures:
        prompt = insert(encoded.tolist(), pictures, model.config)
    request: Request | ConstrainedRequest = Request(
        prompt, params, pictures=pictures, owner=owner, conditions=conditions
    )
    if "grammar" in values:
        start = read_grammar(values["grammar"], model, encoder.tokenizer, owner)
        end = end_of_answer(model, encoder.tokenizer)
        request = ConstrainedRequest(prompt, params, start, end, pictures, owner)
    if "infill" in values:
        if encoder.tokenizer is None:
            raise CanvasError("the model has no tokenizer, so it cannot fill gaps", "leave it out")
        filled = infill_request(
            values["infill"], prompt, params, model, encoder.tokenizer, pictures
        )
        filled.params.check_limits(
            model.config, len(filled.canvases), options.max_steps, options.max_passes
        )
        return ServedRequest(replace(filled, owner=owner), False, ())
    control = bool(values.get("control"))
    return ServedRequest(
        request, bool(values.get("drafts")), stops, control, opening if control else ""
    )


def read_conditions_of(values: Mapping[str, Any]) -> Conditions | None:
    """Return the conditions on a request's positions, if it has any."""
    if "canvas" not in values:
        return None
    for name in ("questions", "grammar", "infill"):
        if name in values:
            raise CanvasError(f"canvas is not supported with {name}", f"leave out {name}")
    if (size := len(values["canvas"])) > MAX_CANVAS:
        raise CanvasError(f"canvas has {size} characters of JSON", f"send at most {MAX_CANVAS}")
    return read_conditions(read_object("canvas", values["canvas"], 'send {"pin": {"0": 17}}'))


def _pictures(
    values: Mapping[str, Any], model: Model, prompt: np.ndarray | None = None, owner: str = ""
) -> list[Picture]:
    """Return a request's images as patches. What can be seen to be wrong is refused before they are
    decoded."""
    files = values.get("images", [])
    budgets = [int(most) for most in values.get("image_tokens", ())] or [SOFT_TOKENS]
    if not files:
        return []
    model.check_sees()
    if len(budgets) not in (1, len(files)):
        raise CanvasError(
            f"image_tokens has {len(budgets)} numbers for {len(files)} images",
            "send one for all of them, or one for each",
        )
    budgets = budgets * len(files) if len(budgets) == 1 else budgets
    # Most images take nearly all of their budget; the exact sum is checked once they are cut.
    if sum(budgets) // 2 > model.max_context:
        raise CanvasError(
            f"{len(files)} images exceed the context of {model.max_context} tokens",
            "send fewer images, or fewer image_tokens",
        )
    if prompt is not None:
        check_places(prompt.tolist(), len(files), model.config)
    assert model.config.vision is not None
    digest = hashlib.sha256(share_of(owner).encode() + b"\n")
    for file, budget in zip(files, budgets, strict=True):
        digest.update(f"{budget} {len(file)} ".encode() + file)
    vision = model.config.vision
    return _seen.get(digest.digest(), lambda: read_pictures(files, vision, budgets))
