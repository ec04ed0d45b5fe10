"""Request bodies: the fields that several endpoints share, and the only function that reads a body.

The tables in `fields` decide which unsupported fields are ignored, and which are errors.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    create_model,
)
from pydantic_core import PydanticCustomError

from canvasrt.containers.openai.errors import bad_request, from_validation, unknown_model
from canvasrt.containers.openai.fields import GENERATION, Ignored, Table, leave_out, settle
from canvasrt.containers.tensors import (
    MAX_BIASED,
    MAX_CANVAS,
    MAX_LISTED,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)
from canvasrt.containers.untrusted import check_json, load_json
from canvasrt.runtime.pictures import BUDGETS
from canvasrt.runtime.sampling_params import MAX_INT32, PARAMETERS, Parameter

MAX_ANSWERS = 128  # maximum answers to one request: prompts times n
# Even a short message or content part costs time, so their numbers are limited.
MAX_MESSAGES = 8192
MAX_PARTS = 8192
# pydantic holds the interpreter's lock while it collects the errors of all members of an object. So in bodies of more
# than _LONG bytes, objects down to a depth of _DEPTH may have at most MAX_MEMBERS members. Lists need no such limit,
# because their validation stops at the first error.
_LONG, MAX_MEMBERS, _DEPTH = 65_536, 8192, 4
_ROUNDS = 4  # maximum validations of a body: each can reveal further unknown fields
# The sampler's parameters, without the two for which OpenAI's API has its own fields.
OWN = tuple(each for each in PARAMETERS if each.name not in ("max_new_tokens", "seed"))


def fail(code: str, message: str) -> PydanticCustomError:
    """Return the error that a field's validator raises."""
    # The message can contain braces, so it cannot itself be pydantic's template.
    return PydanticCustomError(code, "{message}", {"message": message})  # type: ignore[arg-type]


def about(text: str) -> Any:
    """Return the annotation that describes a field in the OpenAPI document."""
    return Field(description=text)


def check_parts(messages: Iterable[Any], name: str) -> None:
    """Raise ApiError if the messages have too many content parts, tool calls and images in total."""
    count = sum(
        len(value)
        for message in messages
        if isinstance(message, dict)
        for value in message.values()
        if isinstance(value, list)
    )
    if count > MAX_PARTS:
        raise bad_request(
            f"{name} has {count} content parts and tool calls; at most {MAX_PARTS} are allowed.",
            name,
            "invalid_value",
        )


def _checked(messages: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
    check_parts(messages, info.field_name or "messages")
    return messages


Messages = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES, description="The chat so far."),
    AfterValidator(_checked),
]
MaybeMessages = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True, max_length=MAX_MESSAGES),
    AfterValidator(_checked),
]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Stops = _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)]


def _stops(value: Any) -> Any:
    value = [value] if isinstance(value, str) else value
    return [each for each in value if each != ""] if isinstance(value, list) else value


Strings = Annotated[
    list[_Stop],
    Field(fail_fast=True),
    BeforeValidator(_stops, json_schema_input_type=_Stops),
]
Whole = Annotated[int, Field(ge=1, le=MAX_INT32)]


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Accepts 5.0 as an integer, because some clients write all numbers like that. In an annotation, this validator must
# follow the integer's limits; otherwise pydantic leaves the limits out of the OpenAPI document.
INTEGRAL = BeforeValidator(_integer)
UNLIMITED = BeforeValidator(lambda tokens: None if tokens == -1 else tokens)  # as in LM Studio
Budget = Annotated[
    Annotated[int, Field(ge=1, le=MAX_INT32), INTEGRAL] | None,
    UNLIMITED,
    about("Maximum number of new tokens; -1 means the default."),
]
Seed = Annotated[
    Annotated[int, Field(ge=-(2**63), le=2**64 - 1), INTEGRAL] | None,
    # As in vLLM and Ollama, -1 means a random seed.
    AfterValidator(lambda seed: None if seed in (None, -1) else seed % 2**64),
    about("Seed of the noise. The same seed gives the same answer; -1 draws a random seed."),
]
ImageTokens = Annotated[
    Literal[BUDGETS] | None,  # type: ignore[valid-type]
    about("Maximum number of tokens per image."),
]
# Converts null to an empty model name.
_MAYBE = BeforeValidator(
    lambda name: "" if name is None else name, json_schema_input_type=str | None
)


class Strict(BaseModel):
    """A body, or part of one. Unknown fields and type conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Body(Strict):
    """The body of a request. Fields that the pydantic model lacks are looked up in `table`. A field that is in neither
    is unknown."""

    model_config = ConfigDict(extra="allow")

    table: ClassVar[Table] = {}
    # Warnings about ignored fields; None if unknown fields are refused.
    _ignored: Ignored | None = PrivateAttr(default=None)

    model: Annotated[
        str,
        _MAYBE,
        about("A name of the served model; the first one if absent."),
    ] = ""

    @property
    def ignored(self) -> Ignored | None:
        """Warnings about ignored fields; None if unknown fields are refused."""
        return self._ignored

    def check(self, size: int) -> None:
        """Raise ApiError for fields that contradict each other. `size` is the body's length in bytes."""

    def check_model(self, served: Collection[str]) -> None:
        """Replace an absent model name with a served one. Raises ApiError 404 for a model that is not served here."""
        self.model = self.model or next(iter(served))
        if self.model not in served:
            raise unknown_model(self.model, served)


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    drafts: bool = False  # our extension: also send the canvas of every step


def _type(parameter: Parameter) -> Any:
    """Return the type of a parameter's field. Limits of real numbers are only documented; the runtime checks them."""
    description = f"{parameter.about[0].upper()}{parameter.about[1:]}."
    if parameter.kind is int:
        least, most = parameter.least, int(parameter.limit)
        return Annotated[int, Field(ge=least, le=most, description=description), INTEGRAL]
    if parameter.kind is bool:
        return Annotated[bool, Field(description=description)]
    low = "exclusiveMinimum" if parameter.above_least else "minimum"
    limits: dict[str, Any] = {low: parameter.least}
    if parameter.most is not None:
        limits["maximum"] = parameter.most
    return Annotated[float, Field(description=description, json_schema_extra=limits)]


if TYPE_CHECKING:
    _Own = Body
else:
    _Own = create_model(
        "_Own", __base__=Body, **{each.name: (_type(each) | None, None) for each in OWN}
    )


_Ids = Annotated[list[Whole | Literal[0]], Field(fail_fast=True, max_length=MAX_CANVAS)]
_Int32 = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None
_Flag = bool | Literal[0, 1] | None  # vLLM accepts 0 and 1, too


class Diffusion(Strict):
    """vLLM's settings for this model, which vLLM takes in `vllm_xargs`."""

    diffusion_seed_canvas: _Ids | None = None
    diffusion_pinned: _Ids | None = None
    diffusion_max_steps: _Int32 = None
    diffusion_canvas_length: _Int32 = None
    diffusion_read_only: _Flag = None
    diffusion_constrained: _Flag = None


class Sampling(_Own, Diffusion):
    """The parameters that all endpoints that generate text share."""

    model_config = ConfigDict(extra="allow")
    table: ClassVar[Table] = GENERATION

    n: Annotated[
        Annotated[int, Field(ge=1, le=MAX_ANSWERS), INTEGRAL] | None,
        about("Number of answers; they have consecutive seeds."),
    ] = None
    seed: Seed = None
    stop: Annotated[
        Annotated[Strings, Field(max_length=MAX_STOPS)] | None,
        about("Strings that end the answer; it is cut before them."),
    ] = None
    stream: Annotated[
        bool | None, about("Stream text as server-sent events as soon as it is final.")
    ] = None
    stream_options: StreamOptions | None = None
    max_tokens: Budget = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Field(max_length=MAX_BIASED)] | None,
        about("Numbers to add to logits, by token id."),
    ] = None
    canvas: Annotated[
        dict[str, Any] | None,
        about("Constraints on positions of the answer: initial, fixed or allowed tokens."),
    ] = None

    response_format: Annotated[
        dict[str, Any] | None,
        about("What the answer must follow: a JSON schema, a regex or a grammar."),
    ] = None

    # vLLM's names for response formats.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    stop_token_ids: Annotated[
        Annotated[list[Whole | Literal[0]], Field(fail_fast=True, max_length=MAX_STOPS)] | None,
        about("Tokens that end the answer, in addition to the checkpoint's."),
    ] = None
    min_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MAX_INT32), INTEGRAL] | None,
        about("Minimum number of tokens before the answer may end."),
    ] = None
    vllm_xargs: Diffusion | None = None
    logprob_token_ids: Annotated[
        Annotated[list[Whole | Literal[0]], Field(fail_fast=True, max_length=MAX_LISTED)] | None,
        about("Tokens to list with each log-probability, in place of the likeliest ones."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, about("Write tokens of log-probabilities as `token_id:17`.")
    ] = None
    ignore_eos: Annotated[bool | None, about("Generate until the token limit, for benchmarks.")] = (
        None
    )

    def check(self, size: int) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream set to true.", "stream_options")
        if size > MAX_CANVAS and (count := len(json.dumps(self.canvas))) > MAX_CANVAS:
            raise bad_request(
                f"canvas has {count} characters of JSON; at most {MAX_CANVAS} are allowed.",
                "canvas",
                "invalid_value",
            )
        if (self.seed or 0) + (self.n or 1) > 2**64:
            raise bad_request("seed + n must stay below 2**64.", "seed", "invalid_value")

    @property
    def wants_drafts(self) -> bool:
        """Whether to send the canvas of every step."""
        return bool(self.stream_options and self.stream_options.drafts)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """The parameter that limits new tokens, and its value."""
        return "max_tokens", self.max_tokens


BodyT = TypeVar("BodyT", bound=Body)


def read_body(kind: type[BodyT], raw: bytes, ignored: Ignored | None = None) -> BodyT:
    """Parse a request's body. If a parameter is wrong, raises an ApiError that names that parameter.

    For every unknown field, a warning is added to `ignored`. If `ignored` is None, unknown fields are refused.
    """
    try:
        check_json(raw)
    except ValueError as error:
        problem = f"The body of the request cannot be read: {error}."
        raise bad_request(problem, None, "invalid_json") from None
    _check_members(raw)
    body = _validated(kind, raw, ignored)
    if b"NaN" in raw or b"Infinity" in raw:  # pydantic accepts both in untyped fields
        with contextlib.suppress(ValueError):
            json.loads(raw, parse_constant=_refuse_constant)
    body._ignored = ignored
    known = {name: getattr(body, name) for name in kind.table if name in kind.model_fields}
    for name, value in {**(body.model_extra or {}), **known}.items():
        settle(name, value, kind.table, ignored)
    body.check(len(raw))
    return body


def translated(kind: type[BodyT], fields: Mapping[str, Any], source: Body) -> BodyT:
    """Convert `source`, a request of one API, to a request of type `kind`. `fields` holds the result's fields; None
    values are left out, and so are unknown fields of tools. Raises ApiError for a wrong value."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        made = kind.model_validate(given)
    except ValidationError:
        made = _validated(kind, json.dumps(given).encode(), source.ignored)
    made._ignored = source.ignored
    return made


def _refuse_constant(name: str) -> None:
    raise bad_request(f"The body of the request is not JSON: it has {name}.", None, "invalid_json")


def _validated(kind: type[BodyT], raw: bytes, ignored: Ignored | None) -> BodyT:
    for _ in range(_ROUNDS):
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False)
            if any(each["type"] != "extra_forbidden" for each in wrong):
                raise from_validation(error) from None
            data = load_json(raw)
            if not leave_out(data, wrong, kind.table, ignored):
                raise from_validation(error) from None
            raw = json.dumps(data).encode()
    raise bad_request("The body of the request has too many unknown parameters.")


def _check_members(raw: bytes) -> None:
    """Raise ApiError if the body is long and an object in it has too many members."""
    if len(raw) <= _LONG:
        return
    try:
        values: list[Any] = [load_json(raw)]
    except ValueError:
        return  # the parser reports the error
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
