"""The bodies of requests. Parameters that would change the answer and are not supported are refused
by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError

from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.functions import Effort, ToolChoice, Tools
from canvasrt.containers.openai.part_limits import Messages
from canvasrt.containers.tensors import MAX_BIASED, MAX_CANVAS, MAX_STOP_LENGTH
from canvasrt.containers.untrusted import load_json
from canvasrt.runtime.pictures import BUDGETS
from canvasrt.runtime.sampling_params import MAX_INT32, PARAMETERS, Parameter

MAX_ANSWERS = 128  # prompts times n
OPENAI_MAX_STOPS = 4  # as in OpenAI's API
MAX_WARNINGS = 16  # about one request
LEFT_OUT = ("extra_forbidden", "unsupported_parameter")
_ROUNDS = 4  # some errors only show once others are gone
# Every mistake in an object's members is collected, with the interpreter's lock held: of bodies longer than this many
# bytes, no object may have more members. Lists end at the first mistake.
_LONG, MAX_MEMBERS, _DEPTH = 65_536, 8192, 4
# OpenAI has parameters of its own for these two.
OWN = tuple(each for each in PARAMETERS if each.name not in ("max_new_tokens", "seed"))
# Why a parameter is refused, when its name does not say it.
_REASONS = {
    "store": "nothing is stored here",
    "best_of": "all n answers are returned",
}


def _fail(code: str, message: str) -> PydanticCustomError:
    # The message may contain braces, which a template may not.
    return PydanticCustomError(code, "{message}", {"message": message})  # type: ignore[arg-type]


def only(*allowed: Any) -> Any:
    """Return the type of a parameter that may only have the value it has by default."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # In Python, True == 1; here it is not.
        same = (
            isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed
        )
        if value is None or any(same):
            return value
        reason = _REASONS.get(info.field_name or "", "")
        problem = f"{info.field_name} is not supported" + (f": {reason}" if reason else "")
        neutral = " or ".join(dict.fromkeys(json.dumps(each) for each in allowed))
        way_out = f"Leave it out{f', or send {neutral}' if neutral else ''}."
        raise _fail("unsupported_parameter", f"{problem}. {way_out}")

    schema = {"enum": [None, *allowed], "description": "Only for clients that always send it."}
    return Annotated[Any, AfterValidator(check), WithJsonSchema(schema)]


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """Return a list of prompts, from one or more strings or lists of token ids."""
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


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Stops = _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=OPENAI_MAX_STOPS)]
Strings = Annotated[
    list[_Stop],
    Field(fail_fast=True),
    BeforeValidator(_one_or_more, json_schema_input_type=_Stops),
]
_Prompts = str | list[str] | list[int] | list[list[int]]
Whole = Annotated[int, Field(ge=1, le=MAX_INT32)]
# Describes the caller; cannot change an answer.
Note = str | None


class Strict(BaseModel):
    """A body, or part of one, without unknown fields or converted values."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    drafts: bool = False  # our own addition: also send the canvas of every step
    include_obfuscation: only(False) = None  # type: ignore[valid-type]


def _type(parameter: Parameter) -> Any:
    """Return a field's type. The model checks the limits of real numbers."""
    about = f"{parameter.about[0].upper()}{parameter.about[1:]}."
    if parameter.kind is int:
        least, most = parameter.least, int(parameter.limit)
        return Annotated[int, Field(ge=least, le=most, description=about)]
    if parameter.kind is bool:
        return Annotated[bool, Field(description=about)]
    low = "exclusiveMinimum" if parameter.above_least else "minimum"
    limits: dict[str, Any] = {low: parameter.least}
    if parameter.most is not None:
        limits["maximum"] = parameter.most
    return Annotated[float, Field(description=about, json_schema_extra=limits)]


if TYPE_CHECKING:
    _Own = Strict
else:
    _Own = create_model(
        "_Own", __base__=Strict, **{each.name: (_type(each) | None, None) for each in OWN}
    )


class Sampling(_Own):
    """The parameters that chats and completions share."""

    # What was left out of a body that was read leniently; None for one that was not.
    _ignored: list[str] | None = PrivateAttr(default=None)

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[Strings, Field(max_length=OPENAI_MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASED)] | None = None
    canvas: dict[str, Any] | None = None

    user: Note = None
    safety_identifier: Note = None
    prompt_cache_key: Note = None
    metadata: dict[str, str] | None = None

    presence_penalty: only(0) = None  # type: ignore[valid-type]
    frequency_penalty: only(0) = None  # type: ignore[valid-type]
    repetition_penalty: only(1) = None  # type: ignore[valid-type]
    service_tier: only("auto", "default") = None  # type: ignore[valid-type]
    response_format: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str] | None:
        """What was left out, where that is allowed; None where it is not."""
        return self._ignored

    @property
    def wants_drafts(self) -> bool:
        """Whether to send the canvas of every step."""
        return bool(self.stream_options and self.stream_options.drafts)

    @property
    def wants_usage(self) -> bool:
        """Whether to end a stream with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """The parameter that limits new tokens, and its value."""
        return "max_tokens", self.max_tokens


class ChatRequest(Sampling):
    """The body of a chat completion."""

    messages: Messages
    max_completion_tokens: Whole | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    image_tokens: Literal[BUDGETS] | None = None  # type: ignore[valid-type]

    functions: only([]) = None  # type: ignore[valid-type]
    function_call: only("none", "auto") = None  # type: ignore[valid-type]
    modalities: only(["text"]) = None  # type: ignore[valid-type]
    audio: only() = None  # type: ignore[valid-type]
    prediction: only() = None  # type: ignore[valid-type]
    verbosity: only("medium") = None  # type: ignore[valid-type]
    web_search_options: only() = None  # type: ignore[valid-type]
    store: only(False) = None  # type: ignore[valid-type]

    @property
    def token_budget(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(Sampling):
    """The body of a completion, which continues the prompt without a chat template."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts, json_schema_input_type=_Prompts)]

    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: only(False) = None  # type: ignore[valid-type]
    suffix: only("") = None  # type: ignore[valid-type]
    best_of: only(1) = None  # type: ignore[valid-type]


BodyT = TypeVar("BodyT", bound=Sampling)
Kind = TypeVar("Kind", bound=Strict)


def read_body(kind: type[BodyT], body: bytes, lenient: bool = False) -> BodyT:
    """Return a request's body. ApiError names the parameter that is wrong.

    With `lenient`, parameters that are unknown or not supported are left out.
    """
    request = parse_leniently(kind, body) if lenient else parse_body(kind, body)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream set to true.", "stream_options")
    if len(body) > MAX_CANVAS and (size := len(json.dumps(request.canvas))) > MAX_CANVAS:
        raise bad_request(
            f"canvas has {size} characters of JSON; at most {MAX_CANVAS} are allowed.",
            "canvas",
            "invalid_value",
        )
    _check_budgets(request)
    if (request.seed or 0) + (request.n or 1) > 2**64:
        raise bad_request("seed + n must stay below 2**64.", "seed", "invalid_value")
    return request


def parse_body(kind: type[Kind], body: bytes) -> Kind:
    """Return a body of any kind. ApiError names the parameter that is wrong."""
    _check_members(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise body_error(error) from None


def parse_leniently(kind: type[BodyT], body: bytes) -> BodyT:
    """Return a body without the parameters that are not supported, which it notes. ApiError names
    one that is wrong."""
    _check_members(body)
    ignored: list[str] = []
    for _ in range(_ROUNDS):
        try:
            request = kind.model_validate_json(body)
        except ValidationError as error:
            if (reply := body_error(error)).code == "invalid_json":
                raise reply from None
            data = json.loads(body)
            for each in error.errors(include_url=False, include_context=False):
                if each["type"] not in LEFT_OUT or not _remove(data, each["loc"]):
                    raise _explain(each) from None
                note(ignored, _explain(each).message)
            body = json.dumps(data).encode()
            continue
        request._ignored = ignored
        return request
    raise bad_request("The body of the request has too many unsupported parameters.")


def _check_members(body: bytes) -> None:
    """Raise ApiError for a long body in which an object has too many members."""
    if len(body) <= _LONG:
        return
    try:
        values: list[Any] = [load_json(body)]
    except ValueError:
        return  # the parser says it
    for _ in range(_DEPTH):
        objects = [each for each in values if isinstance(each, dict)]
        most = max(map(len, objects), default=0)
        if most > MAX_MEMBERS:
            raise bad_request(
                f"An object in the body of the request has {most} members; at most {MAX_MEMBERS} are allowed.",
                None,
                "invalid_value",
            )
        values = [
            part
            for each in values
            if isinstance(each, (dict, list))
            for part in (each.values() if isinstance(each, dict) else each)
        ]


def note(ignored: list[str], message: str) -> None:
    """Add a warning, unless it is there or there are many."""
    if len(ignored) < MAX_WARNINGS and message not in ignored:
        ignored.append(message)


def _remove(data: Any, loc: tuple[int | str, ...]) -> bool:
    """Remove a member from a JSON value. Return whether it was there."""
    *path, name = loc
    for part in path:
        try:
            data = data[part]
        except (LookupError, TypeError):
            return False
    return isinstance(data, dict) and data.pop(name, data) is not data


def _check_budgets(request: Sampling) -> None:
    other = getattr(request, "max_completion_tokens", None)
    if other is not None and request.max_tokens not in (None, other):
        raise bad_request(
            "max_tokens and max_completion_tokens disagree; send one of them.",
            "max_tokens",
            "invalid_value",
        )


def body_error(error: ValidationError) -> ApiError:
    """Return the reply to a body that is wrong."""
    return _explain(error.errors(include_url=False, include_context=False)[0])


def _explain(found: Any) -> ApiError:
    kind, message = found["type"], found["msg"]
    param = _path(found["loc"]) or None
    if kind == "json_invalid":
        why = message.removeprefix("Invalid JSON: ")
        return bad_request(f"The body of the request is not JSON: {why}.", None, "invalid_json")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    if kind == "missing":
        return bad_request(
            f"Missing required parameter: {param!r}.", param, "missing_required_parameter"
        )
    if kind in ("unsupported_parameter", "invalid_type"):  # from _fail
        return bad_request(message, param, kind)
    if param is None:
        return bad_request("The body of the request must be a JSON object.", None, "invalid_type")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_request(f"Invalid {param!r}: {message}.", param, code)


def _path(loc: tuple[int | str, ...]) -> str:
    """Return `stop[1]` for `("stop", 1)`, without pydantic's names for validators."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "").isalnum():
            path += f".{part}" if path else part
    return path
