"""Closed questions that callers send, and their answers, both in the shape of OpenAI's Decisions API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError

MAX_QUESTIONS, MAX_CHOICES = 400, 255
TYPES = ("predicate", "choice", "score")
_FIELDS = {
    "predicate": {"type", "instructions", "name"},
    "choice": {"type", "instructions", "name", "choices"},
    "score": {"type", "instructions", "name", "levels"},
}


@dataclass(frozen=True)
class Option:
    """One possible answer to a question."""

    value: str | bool
    description: str = ""

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return str(self.value).lower() if isinstance(self.value, bool) else self.value


@dataclass(frozen=True)
class Question:
    """One question. A predicate's options are yes and no; a score's options are its levels."""

    type: str
    instructions: str
    options: tuple[Option, ...]
    name: str | None = None
    options_path: str = ""  # the options' path in the request, for error messages

    def answer(self, draws: np.ndarray) -> dict[str, Any]:
        """Return the answer in the form of OpenAI's API, from probabilities `[samples, options]`.

        Probabilities are means over the samples. Every `standard_error` belongs to the number before it, and is null
        for a single sample.
        """
        mean = draws.mean(axis=0)
        best = int(mean.argmax())
        common = {"type": self.type, "name": self.name}
        if self.type == "predicate":
            shown = {"probability": float(mean[0]), "standard_error": _error(draws[:, 0])}
            return {**common, **shown}
        listed = [
            {"value": option.value, "probability": float(p), "standard_error": _error(column)}
            for option, p, column in zip(self.options, mean, draws.T, strict=True)
        ]
        confidence = {"confidence": float(mean[best])}
        if self.type == "choice":
            chosen = {"choice": self.options[best].value, **confidence}
            return {**common, **chosen, "probabilities": listed}
        levels = np.arange(len(self.options))
        for level, each in enumerate(listed):
            each |= {"value": level, "label": self.options[level].text}
        score = {"score": float(mean @ levels), "standard_error": _error(draws @ levels)}
        return {**common, **score, **confidence, "probabilities": listed}


def read_questions(data: Any) -> list[Question]:
    """Parse a JSON list of questions. Raises CanvasError, which names the path of a wrong question."""
    if not isinstance(data, list) or not data:
        raise CanvasError(
            "questions is not a list, or is empty", f"give 1 to {MAX_QUESTIONS} questions"
        )
    if len(data) > MAX_QUESTIONS:
        raise CanvasError(
            f"questions has {len(data)} questions", f"give at most {MAX_QUESTIONS} in one request"
        )
    return [_question(each, f"questions[{number}]") for number, each in enumerate(data)]


def _question(data: Any, path: str) -> Question:
    if not isinstance(data, Mapping):
        raise CanvasError(f"{path} is not an object", "give type, instructions and options")
    kind = data.get("type")
    if kind not in TYPES:
        raise CanvasError(f"{path}.type is {kind!r}", f"give one of {', '.join(TYPES)}")
    for name in data:
        if name not in _FIELDS[kind]:
            known = ", ".join(sorted(_FIELDS[kind]))
            raise CanvasError(f"{path}.{name} is unknown", f"a {kind} has {known}")
    name = data.get("name")
    if name is not None and not isinstance(name, str):
        raise CanvasError(f"{path}.name is {name!r}", "give a string")
    instructions = text_of(data.get("instructions"), f"{path}.instructions")
    if kind == "predicate":
        yes_no = (Option("yes"), Option("no"))
        return Question(kind, instructions, yes_no, name, path)
    field, key = ("choices", "value") if kind == "choice" else ("levels", "label")
    options = _options(data.get(field), key, f"{path}.{field}")
    return Question(kind, instructions, options, name, f"{path}.{field}")


def _options(data: Any, key: str, path: str) -> tuple[Option, ...]:
    if not isinstance(data, list) or not 2 <= len(data) <= MAX_CHOICES:
        count = len(data) if isinstance(data, list) else 0
        raise CanvasError(f"{path} has {count} entries", f"give 2 to {MAX_CHOICES}")
    return tuple(_option(each, key, f"{path}[{number}]") for number, each in enumerate(data))


def _option(data: Any, key: str, path: str) -> Option:
    if not isinstance(data, Mapping) or set(data) - {key, "description"}:
        raise CanvasError(f"{path} is not an option", f"give {key} and, if needed, description")
    value, about = data.get(key), data.get("description") or ""
    boolean = isinstance(value, bool) and key == "value"
    if not boolean and not (isinstance(value, str) and value.strip()):
        raise CanvasError(f"{path}.{key} is {value!r}", "give some text")
    if not isinstance(about, str):
        raise CanvasError(f"{path}.description is {about!r}", "give a string")
    assert isinstance(value, (str, bool))
    return Option(value, about)


def text_of(content: Any, path: str) -> str:
    """Return the text of a string, or of a list of text and JSON parts. Raises CanvasError for anything else."""
    if isinstance(content, str) and content.strip():
        return content
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))
    raise CanvasError(f"{path} is {content!r}", "give some text")


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "input_json" and isinstance(part.get("data"), (dict, list)):
        return json.dumps(part["data"], ensure_ascii=False)
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind in ("input_image", "image_url"):
        raise CanvasError(f"{path} is an image; only input may have images", "send text")
    raise CanvasError(f"{path} is neither text nor JSON", "give input_text or input_json")


def _error(draws: np.ndarray) -> float | None:
    """Return the standard error of the mean over the samples; None for a single sample."""
    count = len(draws)
    return None if count < 2 else float(draws.std(ddof=1) / count**0.5)


def tempered(draws: np.ndarray, temperature: float) -> np.ndarray:
    """Apply a temperature to probabilities `[..., options]`: divide their logarithms by the temperature, then
    normalize."""
    if temperature == 1:
        return draws
    # Probabilities of zero stay zero.
    with np.errstate(divide="ignore"):
        logs = np.log(draws) / temperature
    shares = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True))
