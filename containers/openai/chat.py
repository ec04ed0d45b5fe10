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
    ImageTokens,
    Sampling,
    about,
    fail,
)
from canvasrt.containers.openai.errors import bad_request, leading
from canvasrt.containers.openai.fields import CHAT, COMPLETION, Table, settle
from canvasrt.containers.openai.generation import Generation
from canvasrt.containers.openai.response_formats import Format, format_of
from canvasrt.containers.openai.tools import Conversation, schemas, template_inputs, template_names
from canvasrt.containers.openai.vllm_fields import canvas_of, read_of, sampling_of
from canvasrt.runtime.sampling_params import MAX_INT32

# Refusals name it as `grammar.schema` or "the grammar".
_GRAMMAR = leading("grammar") + r"|(?<=^The )grammar\b"


class ChatRequest(Conversation):
    """The body of a chat completion."""

    table: ClassVar[Table] = CHAT

    max_completion_tokens: Budget = None
    image_tokens: ImageTokens = None

    def check(self, size: int) -> None:
        super().check(size)
        if self.max_completion_tokens is not None and self.max_tokens not in (
            None,
            self.max_completion_tokens,
        ):
            raise bad_request(
                "max_tokens and max_completion_tokens disagree; send one of them.",
                "max_tokens",
                "invalid_value",
            )

    @property
    def token_budget(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


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
        about("Most new tokens; with `echo`, 0 returns the prompt alone."),
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
    asked = Generation(
        {**_options(request, wanted), **inputs},
        messages=request.messages,
        image_tokens=request.image_tokens,
        tools=schemas(request),
        parallel_calls=request.parallel_tool_calls is not False,
        **_shared(request, wanted),
    )
    of_tools = "grammar" in inputs and (wanted is None or "prefix" in inputs)
    asked.names |= template_names(request) | ({_GRAMMAR: "tools"} if of_tools else {})
    return asked


def completion_generation(request: CompletionRequest) -> Generation:
    """Return a completion's generation. Raises ApiError for an invalid prompt or format."""
    prompts = [_prompt(each) for each in request.prompt]
    wanted = format_of(request)
    options, shared = _options(request, wanted), _shared(request, wanted)
    return Generation(options, prompts=prompts, plain=True, **shared)


def _shared(request: Sampling, wanted: Format | None) -> dict[str, Any]:
    return {
        "n": request.n or 1,
        "seed": request.seed,
        "names": {
            "max_new_tokens": request.token_budget[0],
            _GRAMMAR: wanted.path if wanted else "response_format",
            **sampling_of(request)[1],
            **canvas_of(request)[1],
        },
        "ignored": request.ignored,
    }


def _options(request: Sampling, wanted: Format | None) -> dict[str, Any]:
    given: dict[str, Any] = {each.name: getattr(request, each.name) for each in OWN}
    if isinstance(request, CompletionRequest):
        given["echo"] = request.echo or None
        if request.logprobs is not None:  # in a completion, this is the number of top_logprobs
            given |= {"logprobs": True, "top_logprobs": request.logprobs}
    given["logprob_token_ids"] = request.logprob_token_ids
    given["grammar"] = json.dumps(wanted.grammar) if wanted else None
    given["stop"], given["stop_token_ids"] = request.stop, request.stop_token_ids
    given["ignore_eos"] = request.ignore_eos or None
    given["max_new_tokens"] = request.token_budget[1]
    given |= read_of(request)
    if given["ignore_eos"] and given["grammar"]:
        raise bad_request(
            "ignore_eos is not supported with a format or a schema, which decide where the answer ends.",
            "ignore_eos",
            "unsupported_parameter",
        )
    given["logit_bias"] = json.dumps(request.logit_bias) if request.logit_bias else None
    given |= sampling_of(request)[0]
    canvas = canvas_of(request)[0]
    given["canvas"] = json.dumps(canvas) if canvas or request.canvas is not None else None
    given["drafts"] = request.wants_drafts or None
    return {name: value for name, value in given.items() if value is not None and value != []}


def _prompt(prompt: str | Sequence[int]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "raw": True}
    if any(not -(2**31) <= token < 2**31 for token in prompt):
        raise bad_request(
            "prompt contains a number that is not a token id.", "prompt", "invalid_value"
        )
    return {"prompt_ids": list(prompt)}
