"""`/v1/decisions`: closed questions, answered with probabilities, in the form of OpenAI's Decisions API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import TypedDict

from canvasrt.containers.openai.body import (
    MAX_MESSAGES,
    Body,
    ImageTokens,
    Seed,
    about,
    check_parts,
)
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.fields import DECISION, Table, known
from canvasrt.containers.openai.generation import Answer, Generation, Reply
from canvasrt.containers.openai.response_events import usage_of
from canvasrt.containers.openai.responses import NAMES
from canvasrt.defaults import MAX_SAMPLES, MAX_STEPS
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.questions import text_of
from canvasrt.types import Json

_OWN = ("samples", "steps", "layout", "temperatures")
# Supported fields of questions, and of the options of questions.
_QUESTION = ("type", "instructions", "name", "choices", "levels", "value", "label", "description")
_ROLES = {"user": "user", "developer": "system", "system": "system", "assistant": "assistant"}


class Ask(Body):
    """The fields that both endpoints for questions share."""

    table: ClassVar[Table] = DECISION

    samples: Annotated[
        Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_SAMPLES})] | None,
        about("Number of noise samples; probabilities are averaged over them."),
    ] = None
    steps: Annotated[
        Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_STEPS})] | None,
        about("Denoising steps per read."),
    ] = None
    layout: Annotated[str | None, about("How questions are laid out: `letters` or `bare`.")] = None
    temperatures: dict[str, float] | None = None
    seed: Seed = None
    image_tokens: ImageTokens = None

    def asking(self, messages: list[Json], questions: list[Any]) -> Generation:
        """Return the generation that answers questions about a chat. The questions are in OpenAI's form."""
        own = {name: getattr(self, name) for name in _OWN}
        options = {name: value for name, value in own.items() if value is not None}
        return Generation(
            {"questions": json.dumps({"questions": questions, **options})},
            messages=messages,
            seed=self.seed or 0,
            image_tokens=self.image_tokens,
            plain=True,
            ignored=self.ignored,
        )


class DecisionRequest(Ask):
    """The body of `POST /v1/decisions`."""

    input: Any
    questions: Annotated[list[Any], about("Closed questions.")]


class Decisions(TypedDict):
    """An answer to each question."""

    model: str
    answers: list[dict[str, Any]]
    usage: dict[str, Any]
    canvasrt: dict[str, Any]


class DecisionReply(Reply):
    """Renders answers in the form of OpenAI's Decisions API."""

    text_field = "input"

    def whole(self, answers: Sequence[Answer]) -> Json:
        return {
            "model": self.body.model,
            "answers": json.loads(answers[0].final.text)["answers"],
            "usage": usage_of(replace(self.usage, completion_tokens=0)),
            "canvasrt": {**self.own_fields(), "passes": self.usage.denoising_steps},
        }


def decide(body: DecisionRequest) -> Generation:
    """Return a decision's generation. If a field is wrong, raises an ApiError that names that field."""
    questions = [_known(each, f"questions[{i}]", body) for i, each in enumerate(body.questions)]
    return body.asking(_messages(body.input), questions)


def _known(given: Any, path: str, body: Ask) -> Any:
    """Return a question or an option without its unknown fields. Values that are not objects are returned unchanged;
    the model refuses them."""
    if not isinstance(given, dict):
        return given
    read = known(given, _QUESTION, path, DECISION, body.ignored)
    for name in ("choices", "levels"):
        if isinstance(options := read.get(name), list):
            read[name] = [_known(e, f"{path}.{name}[{i}]", body) for i, e in enumerate(options)]
    return read


def _messages(given: Any) -> list[dict[str, Any]]:
    """Convert the field `input` to a chat. It is a string, or a list of messages, tool calls and tool outputs."""
    check_parts(given if isinstance(given, list) else (), "input")
    try:
        if isinstance(given, str):
            return [{"role": "user", "content": text_of(given, "input")}]
        if not isinstance(given, list) or not given:
            raise CanvasError("input is not a string or a list of messages", "send one")
        if len(given) > MAX_MESSAGES:
            raise CanvasError(f"input has {len(given)} messages", f"send at most {MAX_MESSAGES}")
        return [_message(each, f"input[{i}]") for i, each in enumerate(given)]
    except CanvasError as error:
        path = error.message.partition(" ")[0]
        raise bad_request(f"{error.message}: {error.hint}.", path, "invalid_value") from None


def _message(item: Any, path: str) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise CanvasError(f"{path}.role is {role!r}", f"give one of {', '.join(_ROLES)}")
        return {"role": _ROLES[role], "content": _content(item.get("content"), f"{path}.content")}
    if kind in ("function_call", "custom_tool_call"):
        given = item.get("arguments" if kind == "function_call" else "input")
        return {"role": "assistant", "content": f"{item.get('name')}: {given}"}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "user", "content": text_of(item.get("output"), f"{path}.output")}
    raise CanvasError(f"{path} is not a message", "give messages, calls or their outputs")


def _content(content: Any, path: str) -> str | list[dict[str, Any]]:
    """Return a message's text or, if the message has images, its content parts in a chat's form."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, path)
    return [_part(each, f"{path}[{i}]") for i, each in enumerate(content)]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_image", "image_url")


def _part(part: Any, path: str) -> dict[str, Any]:
    if not _is_image(part):
        return {"type": "text", "text": text_of([part], path)}
    image = part.get("image_url")
    if isinstance(image, str):
        image = {"url": image, "detail": part.get("detail")}
    if not isinstance(image, dict):
        raise CanvasError(f"{path} has no image_url", "give a data URL")
    return {"type": "image_url", "image_url": image}


DECISIONS = Endpoint(
    "/v1/decisions",
    "Answer closed questions with probabilities.",
    DecisionRequest,
    decide,
    DecisionReply,
    Decisions,
    names=NAMES,
)
