"""The request bodies of chats and completions, and their conversion to `Generation`s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from canvasrt.containers.openai.body import (
    INTEGRAL,
    MAX_ANSWERS,
    OWN,
    UNLIMITED,
    Budget,
    Sampling,
    about,
    fail,
)
from canvasrt.containers.openai.errors import bad_request, leading
from canvasrt.containers.openai.fields import COMPLETION, Table, settle
from canvasrt.containers.openai.generation import Generation
from canvasrt.containers.openai.response_formats import Format, format_of
from canvasrt.containers.openai.tools import ChatRequest, schemas, template_inputs, template_names
from canvasrt.containers.openai.vllm_fields import canvas_of, read_of, sampling_of
from canvasrt.runtime.sampling_params import MAX_INT32

# The names that refusals use for the input `grammar`: a path such as `grammar.schema`, or "The grammar".
_GRAMMAR = leading("grammar") + r"|(?<=^The )grammar\b"


def _prompts(value: Any) -> Any:
    """Return the field `prompt` as a list of prompts. A prompt is a string or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > MAX_ANSWERS and not isinstance(value[0], int):
            problem = f"prompt has {len(value)} prompts; at most {MAX_ANSWERS} are allowed"
            raise fail("invalid_value", problem)
        if all(type(each) is int for each in value):
            return [value]
        if all(isinstance(each, str) for each in value):
            return value
        if all(isinstance(each, list) and all(type(t) is int for t in each) for each in value):
            return value
    raise fail("invalid_type", "prompt must be a string, a list of strings, or token ids")


_Prompts = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(Sampling):
    """The body of a completion, which continues the prompt without a chat template."""

    table: ClassVar[Table] = COMPLETION

    prompt: Annotated[list[Any], BeforeValidator(_prompts, json_schema_input_type=_Prompts)]

    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MAX_INT32), INTEGRAL] | None,
        UNLIMITED,
        about("Maximum number of new tokens; with `echo`, 0 returns the prompt alone."),
    ] = None
    max_completion_tokens: Budget = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Annotated[bool | None, about("Also return the prompt, and its log-probabilities.")] = None

    def check(self, size: int) -> None:
        super().check(size)
        name, same = "max_completion_tokens", (self.max_tokens,)  # GuideLLM sends both
        settle(name, self.max_completion_tokens, {name: same}, self.ignored)


def chat_generation(request: ChatRequest) -> Generation:
    """Return a chat's generation. Raises ApiError for invalid tools or formats."""
    wanted = format_of(request)
    inputs = template_inputs(request, wanted)
    asked = _generation(request, wanted)
    asked.options |= inputs
    asked.messages, asked.image_tokens = request.messages, request.image_tokens
    asked.tools, asked.parallel_calls = schemas(request), request.parallel_tool_calls is not False
    of_tools = "grammar" in inputs and (wanted is None or "prefix" in inputs)
    asked.names |= template_names(request) | ({_GRAMMAR: "tools"} if of_tools else {})
    return asked


def completion_generation(request: CompletionRequest) -> Generation:
    """Return a completion's generation. Raises ApiError for an invalid prompt or format."""
    prompts = [_prompt(each) for each in request.prompt]
    asked = _generation(request, format_of(request))
    asked.prompts, asked.plain = prompts, True
    if request.echo:
        asked.options["echo"] = True
    if request.logprobs is not None:  # in a completion, this is the number of top_logprobs
        asked.options |= {"logprobs": True, "top_logprobs": request.logprobs}
    return asked


def _generation(request: Sampling, wanted: Format | None) -> Generation:
    """Return a generation without its prompts."""
    given: dict[str, Any] = {each.name: getattr(request, each.name) for each in OWN}
    given["logprob_token_ids"] = request.logprob_token_ids
    given["grammar"] = json.dumps(wanted.grammar) if wanted else None
    given["stop"], given["stop_token_ids"] = request.stop, request.stop_token_ids
    given["ignore_eos"] = request.ignore_eos or None
    name, given["max_new_tokens"] = request.token_budget
    given |= read_of(request)
    if given["ignore_eos"] and given["grammar"]:
        chosen = "ignore_eos" if request.ignore_eos else "diffusion_read_only"
        raise bad_request(
            f"{chosen} is not supported with a format or a schema, which decide where the answer ends.",
            chosen,
            "unsupported_parameter",
        )
    given["logit_bias"] = json.dumps(request.logit_bias) if request.logit_bias else None
    sampling, sampling_names = sampling_of(request)
    canvas, canvas_names = canvas_of(request)
    given |= sampling
    given["canvas"] = json.dumps(canvas) if canvas or request.canvas is not None else None
    given["drafts"] = request.wants_drafts or None
    path = wanted.path if wanted else "response_format"
    return Generation(
        {name: value for name, value in given.items() if value is not None and value != []},
        n=request.n or 1,
        seed=request.seed,
        names={"max_new_tokens": name, _GRAMMAR: path, **sampling_names, **canvas_names},
        ignored=request.ignored,
    )


def _prompt(prompt: str | Sequence[int]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "raw": True}
    if any(not -(2**31) <= token < 2**31 for token in prompt):
        raise bad_request(
            "prompt contains a number that is not a token id.", "prompt", "invalid_value"
        )
    return {"prompt_ids": list(prompt)}
