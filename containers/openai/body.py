"""Bodies of requests: the fields that several endpoints share, and the one place where a body is read.

Fields that are not carried out are `fields`' tables: those that would change the answer are refused by name.
"""

from __future__ import annotations

import contextlib
import json
import re
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

from canvasrt.containers.openai.errors import bad_request, from_validation, path_of, unknown_model
from canvasrt.containers.openai.fields import GENERATION, REASONS, Table, passes
from canvasrt.containers.tensors import MAX_BIASED, MAX_CANVAS, MAX_STOP_LENGTH, MAX_STOPS
from canvasrt.containers.untrusted import check_json, load_json
from canvasrt.runtime.sampling_params import MAX_INT32, PARAMETERS, Parameter

MAX_ANSWERS = 128  # prompts times n
MAX_WARNINGS = 16  # about one request
# Each message and part takes time, however short it is.
MAX_MESSAGES = 8192
MAX_PARTS = 8192
# pydantic collects the mistakes in all members of an object while it holds the interpreter's lock. So in bodies above this many
# bytes, an object may have this many members. Lists end at the first mistake.
_LONG, MAX_MEMBERS, _DEPTH = 65_536, 8192, 4
_ROUNDS = 4  # some errors only show once others are gone
# OpenAI has parameters of its own for these two.
OWN = tuple(each for each in PARAMETERS if each.name not in ("max_new_tokens", "seed"))


def fail(code: str, message: str) -> PydanticCustomError:
    """Return the error that a field's own check raises."""
    # The message may contain braces, which a template may not.
    return PydanticCustomError(code, "{message}", {"message": message})  # type: ignore[arg-type]


def about(text: str) -> Any:
    """Return a field's description in the OpenAPI document."""
    return Field(description=text)


def check_parts(messages: Iterable[Any], name: str) -> None:
    """Raise ApiError for messages with too many parts together: of their contents, tool calls and
    images."""
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
Budget = Annotated[Whole | None, about("Most new tokens.")]
Seed = Annotated[
    Annotated[int, Field(ge=0, lt=2**64)] | None,
    about("Seed of the noise; the same seed gives the same answer."),
]


class Strict(BaseModel):
    """A body, or part of one, without unknown fields or converted values."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Ignored(list[str]):
    """Warnings about what was left out of a request. lenient: also what would change the answer."""

    def __init__(self, lenient: bool = False) -> None:
        super().__init__()
        self.lenient = lenient

    def note(self, message: str) -> None:
        """Add a warning, unless it is there or there are many."""
        if len(self) < MAX_WARNINGS and message not in self:
            self.append(message)


def settle(path: str, value: Any, table: Table, ignored: Ignored | None) -> None:
    """Pass over a field that is not carried out, and note it if it is unknown.

    ApiError where it may not be left out: what would change the answer, and without `ignored`, what is unknown.
    """
    name = re.sub(r"\[\d+\]", "", path)
    if name not in table:
        error = bad_request(f"Unknown parameter: {path!r}.", path, "unknown_parameter")
        if ignored is None:
            raise error
    elif passes(allowed := table[name], value):
        return
    else:
        why = f": {REASONS[name]}" if name in REASONS else ""
        values = " or ".join(json.dumps(each) for each in allowed or ())
        way_out = f"Leave it out{f', or send {values}' if values else ''}."
        message = f"{path} is not supported{why}. {way_out}"
        error = bad_request(message, path, "unsupported_parameter")
        if ignored is None or not ignored.lenient:
            raise error
    ignored.note(error.message)


def known(
    given: Mapping[str, Any],
    names: Collection[str],
    path: str,
    table: Table,
    ignored: Ignored | None,
) -> dict[str, Any]:
    """Return the members of an object with these names. The others are settled, each with its path."""
    for name, value in given.items():
        if name not in names:
            settle(f"{path}.{name}", value, table, ignored)
    return {name: value for name, value in given.items() if name in names}


class Body(Strict):
    """The body of a request. Fields that its model has not are those of its table, or unknown."""

    model_config = ConfigDict(extra="allow")

    table: ClassVar[Table] = {}
    # What was left out; None where nothing unknown may be.
    _ignored: Ignored | None = PrivateAttr(default=None)

    model: Annotated[
        str, about("A name under which the model is served; without one, its first.")
    ] = ""

    @property
    def ignored(self) -> Ignored | None:
        """What was left out; None where nothing unknown may be."""
        return self._ignored

    def check(self, size: int) -> None:
        """Raise ApiError for fields that do not fit together, of a body of `size` bytes."""

    def check_model(self, served: Collection[str]) -> None:
        """Take the served model if none is named. ApiError 404 for one that is not served here."""
        self.model = self.model or next(iter(served))
        if self.model not in served:
            raise unknown_model(self.model, served)


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    drafts: bool = False  # our own addition: also send the canvas of every step


def _type(parameter: Parameter) -> Any:
    """Return a field's type. The model checks the limits of real numbers."""
    description = f"{parameter.about[0].upper()}{parameter.about[1:]}."
    if parameter.kind is int:
        least, most = parameter.least, int(parameter.limit)
        return Annotated[int, Field(ge=least, le=most, description=description)]
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


class Diffusion(Strict):
    """vLLM's settings of this very model, which it takes in `vllm_xargs`."""

    diffusion_seed_canvas: _Ids | None = None
    diffusion_pinned: _Ids | None = None
    diffusion_max_steps: int | None = None
    diffusion_canvas_length: int | None = None


class Sampling(_Own, Diffusion):
    """The parameters of all endpoints that generate text."""

    model_config = ConfigDict(extra="allow")
    table: ClassVar[Table] = GENERATION

    n: Annotated[
        Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None,
        about("How many answers; their seeds follow each other."),
    ] = None
    seed: Seed = None
    stop: Annotated[
        Annotated[Strings, Field(max_length=MAX_STOPS)] | None,
        about("Strings that end the answer, which is cut before them."),
    ] = None
    stream: Annotated[bool | None, about("Send text as server-sent events, once it is final.")] = (
        None
    )
    stream_options: StreamOptions | None = None
    max_tokens: Budget = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Field(max_length=MAX_BIASED)] | None,
        about("Numbers to add to logits, by token id."),
    ] = None
    canvas: Annotated[
        dict[str, Any] | None,
        about("Tokens that positions of the answer begin with, hold, or may have."),
    ] = None

    response_format: Annotated[
        dict[str, Any] | None,
        about("What the answer must follow: a JSON schema, a regex or a grammar."),
    ] = None

    # vLLM's names for the same.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    stop_token_ids: Annotated[
        Annotated[list[Whole | Literal[0]], Field(fail_fast=True, max_length=MAX_STOPS)] | None,
        about("Tokens that end the answer, besides the checkpoint's."),
    ] = None
    min_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MAX_INT32)] | None,
        about("How many tokens come before one that may end the answer."),
    ] = None
    vllm_xargs: Diffusion | None = None
    ignore_eos: Annotated[
        bool | None, about("Never end before the budget, as benchmarks want it.")
    ] = None

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
        """Whether to end a stream with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """The parameter that limits new tokens, and its value."""
        return "max_tokens", self.max_tokens


BodyT = TypeVar("BodyT", bound=Body)


def read_body(kind: type[BodyT], raw: bytes, ignored: Ignored | None = None) -> BodyT:
    """Return a request's body. ApiError names the parameter that is wrong.

    What is unknown is left out and noted in `ignored`; without it, refused.
    """
    try:
        check_json(raw)
    except ValueError as error:
        problem = f"The body of the request cannot be read: {error}."
        raise bad_request(problem, None, "invalid_json") from None
    _check_members(raw)
    body = _validated(kind, raw, ignored)
    if b"NaN" in raw or b"Infinity" in raw:  # pydantic takes both in what has no type
        with contextlib.suppress(ValueError):
            json.loads(raw, parse_constant=_refuse_constant)
    body._ignored = ignored
    known = {name: getattr(body, name) for name in kind.table if name in kind.model_fields}
    for name, value in {**(body.model_extra or {}), **known}.items():
        settle(name, value, kind.table, ignored)
    body.check(len(raw))
    return body


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
            for each in wrong:
                if not _remove(data, each["loc"]):
                    raise from_validation(error) from None
                settle(path_of(each["loc"]), each["input"], kind.table, ignored)
            raw = json.dumps(data).encode()
    raise bad_request("The body of the request has too many unknown parameters.")


def _check_members(raw: bytes) -> None:
    """Raise ApiError for a long body in which an object has too many members."""
    if len(raw) <= _LONG:
        return
    try:
        values: list[Any] = [load_json(raw)]
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


def _remove(data: Any, loc: tuple[int | str, ...]) -> bool:
    """Remove a member from a JSON value. Return whether it was there."""
    *path, name = loc
    for part in path:
        try:
            data = data[part]
        except (LookupError, TypeError):
            return False
    return isinstance(data, dict) and data.pop(name, data) is not data
