"""Lays out questions: builds their prompt and the templates of their answers."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from canvasrt.defaults import MAX_SAMPLES, MAX_STEPS
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.decision import Blank, DecisionRequest, Labels, Template, labels_of
from canvasrt.runtime.answers.questions import TYPES, Question, read_questions, tempered
from canvasrt.runtime.model import Model
from canvasrt.runtime.pictures import Picture, insert
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Message, Tokenizer

LAYOUTS = ("letters", "bare")
_ASK = "Answer each with one letter."
_FIELDS = ("questions", "samples", "steps", "layout", "temperatures")
_COLDEST, _HOTTEST = 0.01, 100.0
_SMALLEST = 32  # minimum number of positions of a canvas; fewer would save nothing


@dataclass(frozen=True)
class Ask:
    """Questions, and how to read their answers.

    The layout `letters` lists all questions with lettered options in the prompt, and reads several letters from one
    canvas. `bare` leaves the prompt unchanged, and reads whole options from one canvas per question. `temperatures`,
    one per type of question, divide the log-probabilities of options."""

    questions: tuple[Question, ...]
    samples: int = 1
    steps: int = 1
    layout: Literal["letters", "bare"] = "letters"
    temperatures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Any) -> Ask:
        """Read the fields of a request. Raises CanvasError, which names the path of a wrong field."""
        if not isinstance(data, Mapping):
            raise CanvasError(
                "questions is not an object", "give an object with a list named questions"
            )
        for name in data:
            if name not in _FIELDS:
                raise CanvasError(f"{name} is unknown", f"the fields are {', '.join(_FIELDS)}")
        samples, steps = data.get("samples", 1), data.get("steps", 1)
        for name, value, most in (("samples", samples, MAX_SAMPLES), ("steps", steps, MAX_STEPS)):
            if type(value) is not int or not 1 <= value <= most:
                raise CanvasError(f"{name} is {value!r}", f"give a whole number from 1 to {most}")
        layout = data.get("layout", "letters")
        if layout not in LAYOUTS:
            raise CanvasError(f"layout is {layout!r}", f"give one of {', '.join(LAYOUTS)}")
        questions = tuple(read_questions(data.get("questions")))
        return cls(questions, samples, steps, layout, _temperatures(data.get("temperatures")))

    def request(
        self,
        messages: Sequence[Message],
        model: Model,
        tokenizer: Tokenizer,
        seed: int,
        pictures: Sequence[Picture] = (),
    ) -> DecisionRequest:
        """Return the request that answers the questions about a chat with these images. Raises CanvasError if a label
        or template does not fit a canvas."""
        make = _letters if self.layout == "letters" else _bare
        templates = make(self.questions, model, tokenizer)
        chat = messages if self.layout == "bare" else with_questions(messages, self.questions)
        params = SamplingParams.from_defaults(
            model.sampler, model.config, seed=seed, max_denoising_steps=self.steps
        )
        ids = tokenizer.encode_chat(chat)
        if pictures:
            ids = insert(ids, pictures, model.config)
        return DecisionRequest(ids, params, pictures, templates=templates, samples=self.samples)

    def answers(self, draws: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Return the questions' answers in order. `draws`: for every question, its options' probabilities in every sample,
        `[samples, options]`."""
        return [
            question.answer(tempered(each, self.temperatures.get(question.type, 1.0)))
            for question, each in zip(self.questions, draws, strict=True)
        ]


def with_questions(messages: Sequence[Message], questions: Sequence[Question]) -> list[Message]:
    """Append the questions to the chat's last message if a user wrote it; otherwise add a user message."""
    text = "\n".join([_ASK, *(_asked(n, q) for n, q in enumerate(questions, 1))])
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    return [*before, {**last, "content": _followed(last["content"], text)}]


def _followed(content: Any, text: str) -> Any:
    """Return a message's content with `text` appended after an empty line."""
    if isinstance(content, str):
        return f"{content}\n\n{text}"
    last = content[-1] if content else None
    if not isinstance(last, Mapping) or last.get("type") != "text":
        return [*content, {"type": "text", "text": text}]
    return [*content[:-1], {**last, "text": f"{last.get('text', '')}\n\n{text}"}]


def _temperatures(data: Any) -> dict[str, float]:
    """Return temperatures, keyed by type of question."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise CanvasError("temperatures is not an object", 'give an object like {"choice": 1.5}')
    for name, value in data.items():
        if name not in TYPES:
            raise CanvasError(f"temperatures.{name} is unknown", f"give {', '.join(TYPES)}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not _COLDEST <= value <= _HOTTEST:
            raise CanvasError(
                f"temperatures.{name} is {value!r}",
                f"give a number from {_COLDEST:g} to {_HOTTEST:g}",
            )
    return dict(data)


def _asked(number: int, question: Question) -> str:
    options = []
    for letter, option in zip(letters(len(question.options)), question.options, strict=True):
        about = f": {option.description}" if option.description else ""
        options.append(f"{letter}) {option.text}{about}")
    return "\n".join([f"{number}. {question.instructions}", *options])


def letters(count: int) -> list[str]:
    """Return the letters of `count` options: A to Z, or AA, AB, … for more than 26."""
    alphabet = string.ascii_uppercase
    if count <= len(alphabet):
        return list(alphabet[:count])
    return [a + b for a in alphabet for b in alphabet][:count]


def _letters(
    questions: Sequence[Question], model: Model, tokenizer: Tokenizer
) -> tuple[Template, ...]:
    """Return templates that have one line per question. Lines are numbered if all of them fit one canvas."""
    end, filler = end_of_answer(model, tokenizer), model.config.pad_token_id
    newline = tuple(tokenizer.encode_text("\n"))
    _check_distinct(questions, tokenizer)
    for numbered in (True, False):
        pieces = []
        for number, question in enumerate(questions):
            lead = tuple(tokenizer.encode_text(f"{number + 1}.")) if numbered else ()
            names = [" " * numbered + each for each in letters(len(question.options))]
            labels = labels_of(
                [tokenizer.encode_text(name) for name in names],
                newline[0],
                filler,
                question.options_path,
            )
            pieces.append((lead, labels))
        groups = _packed(pieces, len(newline), model.canvas_length)
        if len(groups) == 1 or not numbered:
            break
    return tuple(
        _template([(n, *pieces[n]) for n in group], newline, (end,), filler, model)
        for group in groups
    )


def _bare(
    questions: Sequence[Question], model: Model, tokenizer: Tokenizer
) -> tuple[Template, ...]:
    """Return a template per question. The whole answer is one of the options."""
    end, filler = end_of_answer(model, tokenizer), model.config.pad_token_id
    made = []
    for number, question in enumerate(questions):
        texts = [tokenizer.encode_text(option.text) for option in question.options]
        labels = labels_of(texts, end, filler, question.options_path)
        # Labels of different lengths already include the token that ends the answer.
        last = (end,) if len({len(text) for text in texts}) == 1 else ()
        size = labels.width + len(last)
        if size > model.canvas_length:
            raise CanvasError(
                f"{question.options_path} needs {size} tokens",
                f"a canvas has {model.canvas_length}: give shorter options",
            )
        made.append(_template([(number, (), labels)], (), last, filler, model))
    return tuple(made)


def _check_distinct(questions: Sequence[Question], tokenizer: Tokenizer) -> None:
    """Raise CanvasError for options whose tokens are equal or empty."""
    for question in questions:
        texts = [tokenizer.encode_text(option.text) for option in question.options]
        labels_of(texts, -1, -1, question.options_path)


def end_of_answer(model: Model, tokenizer: Tokenizer | None) -> int:
    """Return the token that ends an answer: the token that closes a turn, if possible.

    Raises CanvasError if the model has no token that ends an answer.
    """
    ids = model.config.eos_token_ids
    turn = [] if tokenizer is None else tokenizer.encode("<turn|>", False)
    if len(turn) == 1 and (turn[0] in ids or not ids):
        return turn[0]
    if not ids:
        raise CanvasError(
            "the checkpoint names no token that ends an answer",
            "add eos_token_id to its generation_config.json, and build it again",
        )
    return ids[0]


def _packed(
    pieces: Sequence[tuple[tuple[int, ...], Labels]], gap: int, room: int
) -> list[list[int]]:
    """Group questions, in order, into canvases of `room` tokens. A newline of `gap` tokens follows
    each question, except at the end of a canvas, where the end of the answer follows."""
    groups: list[list[int]] = []
    used = room
    for number, (lead, labels) in enumerate(pieces):
        size = len(lead) + labels.width + gap
        if size > room:
            raise CanvasError(
                f"questions[{number}] needs a template of {size} tokens",
                f"a canvas has {room}: give fewer options",
            )
        if used + size > room:
            groups.append([])
            used = 0
        groups[-1].append(number)
        used += size
    return groups


def _template(
    parts: Sequence[tuple[int, tuple[int, ...], Labels]],
    newline: tuple[int, ...],
    end: tuple[int, ...],
    filler: int,
    model: Model,
) -> Template:
    """Return a template of `parts`. Every part is a question's number, the tokens before its label, and its labels."""
    tokens: list[int] = []
    blanks = []
    for question, lead, labels in parts:
        tokens += [*newline, *lead] if tokens else lead
        blanks.append(Blank(question, len(tokens), labels))
        tokens += labels.tokens[0]
    tokens += end
    least = max(len(tokens), min(_SMALLEST, model.canvas_length))
    size = next(each for each in model.canvas_sizes if each >= least)
    return Template((*tokens, *[filler] * (size - len(tokens))), tuple(blanks))
