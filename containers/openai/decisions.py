"""The endpoints that answer closed questions: OpenAI's Decisions API, and System One's shape of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.aside import Aside
from canvasrt.containers.openai.disconnect import unless_disconnected
from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.inputs import image_inputs
from canvasrt.containers.openai.messages import Chat, read_messages
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.middleware import parameters_of
from canvasrt.containers.openai.part_limits import MAX_MESSAGES, check_parts
from canvasrt.containers.openai.remote import Fetcher, inline
from canvasrt.containers.openai.responses import renamed
from canvasrt.containers.openai.schema import Note, Strict
from canvasrt.containers.openai.upstream import Upstream
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.infill import default_prompt
from canvasrt.runtime.answers.questions import text_of
from canvasrt.runtime.pictures import BUDGETS

_OWN = ("samples", "steps", "layout", "temperatures")
_ROLES = {"user": "user", "developer": "system", "system": "system", "assistant": "assistant"}
MAX_OPTIONS = 26  # of a System One question


class _Ask(Strict):
    """What both endpoints take: our own fields have the same names in both."""

    model: str
    samples: int | None = None
    steps: int | None = None
    layout: str | None = None
    temperatures: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    image_tokens: Literal[BUDGETS] | None = None  # type: ignore[valid-type]

    def inputs(self, chat: Chat, questions: list[Any]) -> dict[str, Any]:
        """Return the inputs of the served model."""
        own = {name: getattr(self, name) for name in _OWN}
        options = {name: value for name, value in own.items() if value is not None}
        return {
            "messages": json.dumps(chat.messages),
            "questions": json.dumps({"questions": questions, **options}),
            "seed": self.seed or 0,
            **image_inputs(chat, self.image_tokens),
        }


class DecisionRequest(_Ask):
    """The body of `POST /v1/decisions`."""

    input: Any
    questions: list[Any]
    safety_identifier: Note = None
    prompt_cache_key: Note = None
    prompt_cache_options: dict[str, Any] | None = None


class SystemOneRequest(_Ask):
    """The body of `POST /v1/systemone`."""

    state: Any
    questions: dict[str, Any]


class InfillRequest(Strict):
    """The body of `POST /v1/infill`, which is our own."""

    model: str
    text: str
    prompt: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    max_denoising_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None


AnyRequest = DecisionRequest | SystemOneRequest | InfillRequest
# The field that has what the model reads.
_TEXTS = {DecisionRequest: "input", SystemOneRequest: "state", InfillRequest: "text"}


class Decisions:
    """Answers requests with questions, or with gaps, through one upstream."""

    def __init__(
        self,
        upstream: Upstream,
        metrics: FrontMetrics,
        aside: Aside,
        fetcher: Fetcher | None = None,
    ) -> None:
        """Without a `fetcher`, remote images are refused."""
        self._upstream = upstream
        self._aside = aside
        self._metrics = metrics
        self._fetcher = fetcher

    async def decide(self, request: Request, body: DecisionRequest) -> Response:
        """Answer in OpenAI's shape."""
        inputs = await self._inputs(body, len(await request.body()))
        final = await unless_disconnected(request.receive, self._ask(inputs, request, body))
        count = len(final.prompt_token_ids)
        usage = {
            "input_tokens": count,
            "input_tokens_details": {
                "cached_tokens": final.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": count,
        }
        return JSONResponse(
            {
                "model": body.model,
                "answers": json.loads(final.text)["answers"],
                "usage": usage,
                "canvasrt": {"seed": final.seed, "passes": sum(final.steps)},
            }
        )

    async def systemone(self, request: Request, body: SystemOneRequest) -> Response:
        """Answer in System One's shape."""
        size = len(await request.body())
        questions, inputs = await self._aside.run(size, _own_inputs, body)
        try:
            final = await unless_disconnected(request.receive, self._ask(inputs, request, body))
        except ApiError as error:
            raise _by_name(error, list(questions)) from None
        found = json.loads(final.text)["answers"]
        answers = {
            name: _own_answer(question, answer)
            for (name, question), answer in zip(questions.items(), found, strict=True)
        }
        usage = {"input_tokens": len(final.prompt_token_ids), "output_tokens": 0}
        return JSONResponse({"model": body.model, "answers": answers, "usage": usage})

    async def infill(self, request: Request, body: InfillRequest) -> Response:
        """Fill the gaps of a text."""
        inputs = await self._aside.run(len(await request.body()), _infill_inputs, body)
        final = await unless_disconnected(request.receive, self._ask(inputs, request, body))
        count, made = len(final.prompt_token_ids), len(final.token_ids)
        usage = {
            "prompt_tokens": count,
            "completion_tokens": made,
            "total_tokens": count + made,
            "denoising_steps": sum(final.steps),
        }
        found = json.loads(final.text)
        own = {"seed": final.seed}
        return JSONResponse({"model": body.model, **found, "usage": usage, "canvasrt": own})

    async def _inputs(self, body: DecisionRequest, size: int) -> dict[str, Any]:
        """Return the inputs of the served model, for a body of `size` bytes; images are fetched and
        decoded."""
        messages = await self._aside.run(size, _messages, body.input)
        try:
            if self._fetcher is not None:
                size += await inline(messages, self._fetcher)
            return await self._aside.run(size, _inputs, body, messages)
        except ApiError as error:
            raise renamed(error) from None

    async def _ask(
        self, inputs: Mapping[str, Any], request: Request, body: AnyRequest
    ) -> StreamEvent:
        """Return the one event that answers. Errors have the caller's name for what is wrong."""
        parameters = parameters_of(request)
        try:
            (final,) = [event async for event in self._upstream.stream(inputs, parameters)]
        except ApiError as error:
            field = re.match(r"\w*", error.param or "")
            if error.status == 400 and field and field[0] not in type(body).model_fields:
                error.param = _TEXTS[type(body)]
            raise
        self._metrics.tokens["prompt"] += len(final.prompt_token_ids)
        self._metrics.steps += sum(final.steps)
        return final


def _inputs(body: DecisionRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return body.inputs(read_messages(messages), body.questions)


def _own_inputs(body: SystemOneRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the questions in OpenAI's shape, by name, and the inputs of the served model."""
    questions = {name: _own_question(each, name) for name, each in body.questions.items()}
    state = body.state if isinstance(body.state, str) else json.dumps(body.state)
    if not state.strip():
        raise bad_request("state is empty.", "state", "invalid_value")
    chat = Chat([{"role": "user", "content": state}], [])
    return questions, body.inputs(chat, list(questions.values()))


def _infill_inputs(body: InfillRequest) -> dict[str, Any]:
    return {
        "prompt": body.prompt or default_prompt(body.text),
        "infill": body.text,
        "seed": body.seed or 0,
        "max_denoising_steps": body.max_denoising_steps,
    }


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the chat in `input`: a string, or messages and calls of tools with their outputs."""
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
    """Return the text of a message; with images, a chat's parts."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, path)
    return [
        _image(each, f"{path}[{i}]")
        if _is_image(each)
        else {"type": "text", "text": text_of([each], f"{path}[{i}]")}
        for i, each in enumerate(content)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_image", "image_url")


def _image(part: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an image part as a chat has it."""
    image = part.get("image_url")
    if isinstance(image, str):
        image = {"url": image, "detail": part.get("detail")}
    if not isinstance(image, dict):
        raise CanvasError(f"{path} has no image_url", "give a data URL")
    return {"type": "image_url", "image_url": image}


def _own_question(question: Any, name: str) -> dict[str, Any]:
    """Return a System One question in OpenAI's shape."""
    path = f"questions.{name}"
    kind = question.get("type") if isinstance(question, dict) else None
    if kind not in ("noul", "choice", "score"):
        raise bad_request(
            f"{path}.type is {kind!r}: give noul, choice or score.", f"{path}.type", "invalid_value"
        )
    extra = set(question) - {"type", "instructions", "criteria"}
    if extra:
        raise bad_request(f"{path}.{min(extra)} is unknown.", f"{path}.{min(extra)}")
    instructions, criteria = _text(question.get("instructions")), question.get("criteria")
    if kind == "noul":
        if isinstance(criteria, dict):
            instructions += "".join(f"\n{key}: {_text(each)}" for key, each in criteria.items())
        return {"type": "predicate", "instructions": instructions}
    if not isinstance(criteria, dict if kind == "choice" else list):
        raise bad_request(
            f"{path}.criteria is missing or of the wrong type.", f"{path}.criteria", "invalid_type"
        )
    if len(criteria) > MAX_OPTIONS:
        raise bad_request(
            f"{path}.criteria has {len(criteria)} options: give at most {MAX_OPTIONS}.",
            f"{path}.criteria",
            "invalid_value",
        )
    if kind == "score":
        levels = [{"label": _text(each)} for each in criteria]
        return {"type": "score", "instructions": instructions, "levels": levels}
    items = dict(criteria).items()
    choices = [{"value": key, "description": _text(each)} for key, each in items]
    return {"type": "choice", "instructions": instructions, "choices": choices}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


def _own_answer(question: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer in System One's shape."""
    if question["type"] == "predicate":
        return {"type": "noul", "noul": answer["probability"]}
    shares = [each["probability"] for each in answer["probabilities"]]
    # From 0, where all options are alike, to 1.
    confidence = (len(shares) * max(shares) - 1) / (len(shares) - 1)
    if question["type"] == "choice":
        values = [each["value"] for each in answer["probabilities"]]
        found = {"type": "choice", "choice": answer["choice"]}
        return {
            **found,
            "probabilities": dict(zip(values, shares, strict=True)),
            "confidence": confidence,
        }
    return {
        "type": "score",
        "score": answer["score"],
        "legend": {str(i): each["label"] for i, each in enumerate(question["levels"])},
        "probabilities": {str(i): share for i, share in enumerate(shares)},
        "confidence": confidence,
    }


def _by_name(error: ApiError, names: list[str]) -> ApiError:
    """Return the error with the caller's name for a question, which the model only numbers."""

    def name(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"questions.{names[number]}" if number < len(names) else match[0]

    def renamed(text: str) -> str:
        named = re.sub(r"questions\[(\d{1,4})\]", name, text)
        return re.sub(r"\.(choices|levels)\b", ".criteria", named)

    error.message = renamed(error.message)
    error.param = renamed(error.param) if error.param else None
    return error
