"""What a request may say. Anything that would change the answer and is not supported is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from canvasrt.containers.openai.errors import ApiError, bad_request

MAX_ANSWERS = 128  # prompts times n
MAX_STOPS = 4  # as OpenAI does
_MAX_INT32 = 2**31 - 1
_SAMPLER = "this model's sampler is set with t_max, t_min and entropy_bound"
# Why a parameter is refused, where its name alone would not say it.
_REASONS = {
    "temperature": _SAMPLER,
    "top_p": _SAMPLER,
    "top_k": _SAMPLER,
    "min_p": _SAMPLER,
    "store": "nothing is stored here",
    "best_of": "n answers are made, and all of them are returned",
}


def _fail(code: str, message: str) -> PydanticCustomError:
    # The message may hold braces of its own, which a template may not.
    return PydanticCustomError(code, "{said}", {"said": message})  # type: ignore[arg-type]


def _only(*allowed: Any) -> Any:
    """A parameter that may only say what happens without it."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # true is no 1, though Python says so.
        same = (
            isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed
        )
        if value is None or any(same):
            return value
        reason = _REASONS.get(info.field_name or "", "")
        said = f"{info.field_name} is not supported" + (f": {reason}" if reason else "")
        neutral = " or ".join(dict.fromkeys(json.dumps(each) for each in allowed))
        way_out = f"Leave it out{f', or send {neutral}' if neutral else ''}."
        raise _fail("unsupported_parameter", f"{said}. {way_out}")

    return Annotated[Any, AfterValidator(check)]


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """A string, strings, token ids, or lists of those → a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(each) is int for each in value):
            return [value]
        if all(isinstance(each, str) for each in value):
            return value
        if all(isinstance(each, list) and all(type(t) is int for t in each) for each in value):
            return value
    raise _fail("invalid_type", "prompt must be a string, a list of strings, or token ids")


Strings = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_one_or_more)]
Whole = Annotated[int, Field(ge=1, le=_MAX_INT32)]
# Who asks, and what for: nothing that could change an answer.
Note = str | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: _only(False) = None  # type: ignore[valid-type]


class Sampling(_Strict):
    """What chats and completions share."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[Strings, Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None

    # Settings of our own, by the names that they have everywhere else.
    max_denoising_steps: Whole | None = None
    entropy_bound: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    confidence_threshold: float | None = None
    early_stop: bool | None = None

    user: Note = None
    safety_identifier: Note = None
    prompt_cache_key: Note = None
    metadata: dict[str, str] | None = None

    temperature: _only(1) = None  # type: ignore[valid-type]
    top_p: _only(1) = None  # type: ignore[valid-type]
    top_k: _only(-1, 0) = None  # type: ignore[valid-type]
    min_p: _only(0) = None  # type: ignore[valid-type]
    presence_penalty: _only(0) = None  # type: ignore[valid-type]
    frequency_penalty: _only(0) = None  # type: ignore[valid-type]
    repetition_penalty: _only(1) = None  # type: ignore[valid-type]
    logit_bias: _only({}) = None  # type: ignore[valid-type]
    service_tier: _only("auto", "default") = None  # type: ignore[valid-type]
    response_format: _only({"type": "text"}) = None  # type: ignore[valid-type]

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """The most new tokens, and the name that the caller gave them."""
        return "max_tokens", self.max_tokens


class ChatRequest(Sampling):
    """The body of a chat completion."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Whole | None = None

    logprobs: _only(False) = None  # type: ignore[valid-type]
    top_logprobs: _only(0) = None  # type: ignore[valid-type]
    tools: _only([]) = None  # type: ignore[valid-type]
    tool_choice: _only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: _only(True, False) = None  # type: ignore[valid-type]
    functions: _only([]) = None  # type: ignore[valid-type]
    function_call: _only("none", "auto") = None  # type: ignore[valid-type]
    modalities: _only(["text"]) = None  # type: ignore[valid-type]
    audio: _only() = None  # type: ignore[valid-type]
    prediction: _only() = None  # type: ignore[valid-type]
    reasoning_effort: _only("none") = None  # type: ignore[valid-type]
    verbosity: _only("medium") = None  # type: ignore[valid-type]
    web_search_options: _only() = None  # type: ignore[valid-type]
    store: _only(False) = None  # type: ignore[valid-type]

    @property
    def token_budget(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(Sampling):
    """The body of a completion: the prompt is continued as it is, without a chat template."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]

    logprobs: _only() = None  # type: ignore[valid-type]
    echo: _only(False) = None  # type: ignore[valid-type]
    suffix: _only("") = None  # type: ignore[valid-type]
    best_of: _only(1) = None  # type: ignore[valid-type]


Body = TypeVar("Body", bound=Sampling)


def read_body(kind: type[Body], body: bytes) -> Body:
    """A request out of its JSON; ApiError names the parameter that is wrong."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error) from None
    if asked.stream_options is not None and not asked.stream:
        raise bad_request(
            "stream_options is only for requests with stream set to true.", "stream_options"
        )
    _check_budgets(asked)
    if (asked.seed or 0) + (asked.n or 1) > 2**64:
        raise bad_request("seed + n must stay below 2**64.", "seed", "invalid_value")
    return asked


def _check_budgets(asked: Sampling) -> None:
    other = getattr(asked, "max_completion_tokens", None)
    if other is not None and asked.max_tokens not in (None, other):
        raise bad_request(
            "max_tokens and max_completion_tokens disagree: send one of them.",
            "max_tokens",
            "invalid_value",
        )


def _explained(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    kind, message = first["type"], first["msg"]
    param = _path(first["loc"]) or None
    if kind == "json_invalid":
        why = message.removeprefix("Invalid JSON: ")
        return bad_request(f"The body of the request is not JSON: {why}.", None, "invalid_json")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    if kind == "missing":
        return bad_request(
            f"Missing required parameter: {param!r}.", param, "missing_required_parameter"
        )
    if kind in ("unsupported_parameter", "invalid_type"):  # our own
        return bad_request(message, param, kind)
    if param is None:
        return bad_request("The body of the request must be a JSON object.", None, "invalid_type")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_request(f"Invalid {param!r}: {message}.", param, code)


def _path(loc: tuple[int | str, ...]) -> str:
    """`("stop", 1)` → `stop[1]`; what pydantic says about validators is left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "").isalnum():
            path += f".{part}" if path else part
    return path
