"""Reads a caller's tensors as a request for the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from canvasrt.containers.tensors import (
    OPTIONS,
    check_stops,
    chosen_prompt,
    read_inputs,
    read_messages,
    read_template,
)
from canvasrt.containers.triton.decisions import read_decisions
from canvasrt.containers.triton.grammar import read_grammar
from canvasrt.defaults import SOFT_TOKENS
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.infill import infill_request
from canvasrt.runtime.answers.layout import Ask, end_of_answer
from canvasrt.runtime.generator import Request, Work
from canvasrt.runtime.model import Model
from canvasrt.runtime.pictures import Picture, insert, read_picture
from canvasrt.runtime.sampling import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer


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
    arrays: Mapping[str, np.ndarray], model: Model, tokenizer: Tokenizer | None
) -> ServedRequest:
    """Return a caller's request. CanvasError names the tensor that is wrong."""
    values = read_inputs(arrays)
    # Options before the prompt: checking them is cheap, encoding a long prompt is not.
    options = {tensor.name: values.get(tensor.name) for tensor in OPTIONS}
    params = SamplingParams.from_defaults(model.sampler, model.config, **options)
    if "questions" in values:
        chosen_prompt(values)
        if "images" in values:
            raise CanvasError("questions are not supported with images", "send text alone")
        ask, read = read_decisions(values, model, tokenizer)
        return ServedRequest(read, False, (), ask=ask)
    stops = check_stops(values.get("stop") or ())
    if stops and tokenizer is None:
        raise CanvasError(
            "the model has no tokenizer, so it cannot find stop strings", "leave out stop"
        )
    prompt, opening = _prompt(values, tokenizer)
    pictures = _pictures(values, model)
    if pictures:
        for name in ("grammar", "infill"):
            if name in values:
                raise CanvasError(f"{name} is not supported with images", "send text alone")
        prompt = insert(prompt, pictures, model.config)
    request: Request | ConstrainedRequest = Request(prompt, params, pictures=pictures)
    if "grammar" in values:
        start = read_grammar(values["grammar"], model, tokenizer)
        request = ConstrainedRequest(prompt, params, start, end_of_answer(model, tokenizer))
    if "infill" in values:
        if tokenizer is None:
            raise CanvasError("the model has no tokenizer, so it cannot fill gaps", "leave it out")
        filled = infill_request(values["infill"], prompt, params, model, tokenizer)
        return ServedRequest(filled, False, ())
    control = bool(values.get("control"))
    return ServedRequest(
        request, bool(values.get("drafts")), stops, control, opening if control else ""
    )


def _pictures(values: Mapping[str, Any], model: Model) -> list[Picture]:
    """Return a request's images as patches."""
    files, budgets = values.get("images", []), values.get("image_tokens") or [SOFT_TOKENS]
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
    assert model.config.vision is not None
    return [
        read_picture(file, model.config.vision, budget)
        for file, budget in zip(files, budgets, strict=True)
    ]


def _prompt(values: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[list[int], str]:
    """Return the prompt's tokens, and the beginning of the answer that they hold."""
    chosen = chosen_prompt(values)
    prefix = values.get("prefix", "")
    if chosen == "prompt_ids":
        _no_chat(values, "prompt_ids")
        return list(values["prompt_ids"]), ""
    if tokenizer is None:
        raise CanvasError(
            f"the model has no tokenizer, so it cannot encode {chosen}", "send prompt_ids"
        )
    if chosen == "messages":
        messages = read_messages(values["messages"])
        return tokenizer.open_chat(messages, read_template(values.get("template", "{}")), prefix)
    text = values["prompt"]
    if not text.strip():
        raise CanvasError("the prompt is empty", "send some text")
    if values.get("raw"):
        _no_chat(values, "raw")
        return tokenizer.encode(text), ""
    if not tokenizer.has_template:
        raise CanvasError(
            "the model's tokenizer has no chat template to apply to prompt",
            "set raw to true to continue the prompt as it is, or send prompt_ids",
        )
    chat = [{"role": "user", "content": text}]
    return tokenizer.open_chat(chat, read_template(values.get("template", "{}")), prefix)


def _no_chat(values: Mapping[str, Any], why: str) -> None:
    """Raise CanvasError for inputs of a chat in a request without one."""
    for name in ("template", "prefix"):
        if name in values:
            raise CanvasError(
                f"{name} has no meaning with {why}, which takes no chat template",
                f"leave out {name}, or send messages",
            )
