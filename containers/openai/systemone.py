"""`/v1/systemone`: closed questions in System One's format, converted to OpenAI's Decisions API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from typing_extensions import TypedDict

from canvasrt.containers.openai.body import about
from canvasrt.containers.openai.decisions import Ask
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.fields import DECISION, Ignored, known
from canvasrt.containers.openai.generation import Answer, Generation, Reply
from canvasrt.types import Json

MAX_OPTIONS = 26  # per question


class SystemOneRequest(Ask):
    """The body of `POST /v1/systemone`."""

    state: Any
    questions: Annotated[dict[str, Any], about("Closed questions.")]


class SystemOneAnswers(TypedDict):
    """An answer to each question, by its name."""

    model: str
    answers: dict[str, Any]
    usage: dict[str, Any]
    canvasrt: dict[str, Any]


def ask(body: SystemOneRequest) -> Generation:
    """Return the generation that answers questions. If a field is wrong, raises an ApiError that names that field."""
    questions = [_question(each, name, body.ignored) for name, each in body.questions.items()]
    state = "null" if body.state is None else _text(body.state)
    if not state.strip():
        raise bad_request("state is empty.", "state", "invalid_value")
    asked = body.asking([{"role": "user", "content": state}], questions)
    names = {rf"questions\[{i}\]": f"questions.{name}" for i, name in enumerate(body.questions)}
    asked.names = names | {r"\.(choices|levels)\b": ".criteria"}
    return asked


class SystemOneReply(Reply):
    """Renders answers in System One's shape."""

    text_field = "state"

    def whole(self, answers: Sequence[Answer]) -> Json:
        questions = json.loads(self.asked.options["questions"])["questions"]
        found = json.loads(answers[0].final.text)["answers"]
        return {
            "model": self.body.model,
            "answers": {
                name: _answer(question, answer)
                for name, question, answer in zip(
                    self.body.questions, questions, found, strict=True
                )
            },
            "usage": {"input_tokens": self.usage.prompt_tokens, "output_tokens": 0},
            "canvasrt": self.own_fields(),
        }


def _question(question: Any, name: str, ignored: Ignored | None) -> dict[str, Any]:
    """Return a System One question in OpenAI's shape."""
    path = f"questions.{name}"
    kind = question.get("type") if isinstance(question, dict) else None
    if kind not in ("noul", "choice", "score"):
        raise bad_request(
            f"{path}.type is {kind!r}: give noul, choice or score.", f"{path}.type", "invalid_value"
        )
    question = known(question, ("type", "instructions", "criteria"), path, DECISION, ignored)
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


def _answer(question: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer in System One's shape."""
    if question["type"] == "predicate":
        return {"type": "noul", "noul": answer["probability"]}
    shares = [each["probability"] for each in answer["probabilities"]]
    # Between 0, if all options are equally likely, and 1, if one option is certain.
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


SYSTEM_ONE = Endpoint(
    "/v1/systemone",
    "Answer closed questions, in System One's shape.",
    SystemOneRequest,
    ask,
    SystemOneReply,
    SystemOneAnswers,
)
