"""Labelled questions: reads them from a file, asks a bundle, and measures its probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from canvasrt import progress
from canvasrt.bundle import Bundle
from canvasrt.demo.labelled import labelled
from canvasrt.errors import CanvasError
from canvasrt.fidelity.calibration_error import Scored, cross_fitted, fit_temperatures, summary
from canvasrt.recipes.fields import read_yaml
from canvasrt.runtime.answers.decision import DecisionRequest, DecisionResult
from canvasrt.runtime.answers.layout import Ask
from canvasrt.runtime.answers.questions import TYPES, Question, text_of
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import BUDGETS, read_picture
from canvasrt.runtime.request import Finished
from canvasrt.runtime.tokenizer import Tokenizer
from canvasrt.types import Json

DEMO_QUESTIONS = "demo"
_DEMO_CASES = 140  # number of cases per task
_FIELDS = ("input", "images", "image_tokens", "questions", "layout", "group")


def measure_decisions(
    bundle: Bundle, file: str, samples: int = 1, steps: int = 1, fitted: bool = False
) -> Json:
    """Measure a bundle's probabilities on the questions of a file or of the demo. A question is read after `steps`
    denoising steps, once for each of `samples` draws of noise.

    If `fitted` is true, also return a temperature per type and the effect of these temperatures: each half of the
    questions is measured at temperatures that were fitted on the other half. Raises CanvasError for an invalid file.
    """
    if file == DEMO_QUESTIONS:
        # The second training phase's questions are included only if the model has the trained vision tower.
        vision = bundle.manifest.model.vision or {}
        items = labelled(_DEMO_CASES, more=vision.get("num_hidden_layers", 0) > 1)
    else:
        items = read_labelled(Path(file))
    reading = {"samples": samples, "steps": steps}
    scored = _answers(bundle, file, items, reading)
    report = {"file": file, **reading, **_by_part(scored), "fit": None}
    if fitted:
        if len(scored) < 2:
            raise CanvasError(
                f"{file} has only one question", "give at least two to fit temperatures"
            )
        report["fit"] = {"temperatures": fit_temperatures(scored), **_by_part(cross_fitted(scored))}
    return report


def _by_part(scored: Sequence[Scored]) -> Json:
    """Return the measurements over all questions, per type, and per group."""
    types = [kind for kind in TYPES if any(each.type == kind for each in scored)]
    groups = list(dict.fromkeys(each.group for each in scored if each.group))
    return {
        "all": summary(scored),
        "types": [
            {"name": kind, **summary([each for each in scored if each.type == kind])}
            for kind in types
        ],
        "groups": [
            {"name": name, **summary([each for each in scored if each.group == name])}
            for name in groups
        ],
    }


def read_labelled(file: Path) -> list[Json]:
    """Return the items of a file that contains JSON Lines, or a YAML or JSON list."""
    items = _lines(file) if file.suffix == ".jsonl" else read_yaml(file, "give JSON Lines or YAML")
    if not isinstance(items, list) or not items:
        raise CanvasError(f"{file} has no labelled questions", "give a list of labelled questions")
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise CanvasError(
                f"{file}: [{number}] is not an object", "give an object with input and questions"
            )
        for name in item:
            if name not in _FIELDS:
                raise CanvasError(
                    f"{file}: [{number}].{name} is unknown", f"give {', '.join(_FIELDS)}"
                )
    return [{**item, "images": _files(item, file, i)} for i, item in enumerate(items)]


def _lines(file: Path) -> list[Any]:
    try:
        text = file.read_text("utf-8")
        # JSON allows other separators, such as U+2028, in strings.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CanvasError(f"cannot read {file}: {why}", "give JSON Lines or YAML") from None


def _files(item: Mapping[str, Any], file: Path, number: int) -> list[bytes]:
    names = item.get("images") or []
    if not isinstance(names, list):
        raise CanvasError(f"{file}: [{number}].images is not a list", "give the files' names")
    try:
        return [(file.parent / str(name)).read_bytes() for name in names]
    except OSError as error:
        raise CanvasError(f"{file}: [{number}].images: {error}", "give readable files") from None


def _answers(bundle: Bundle, file: str, items: Sequence[Json], reading: Json) -> list[Scored]:
    """Ask every question. Item i is read with seed i. All questions are checked before the first is asked."""
    model, tokenizer = open_model(bundle.path), Tokenizer.load(bundle)

    def request(number: int) -> tuple[Ask, list[np.ndarray], DecisionRequest]:
        try:
            made = _request(items[number], model, tokenizer, reading, number)
            generator.check(made[2])
        except CanvasError as error:
            raise CanvasError(f"{file}: [{number}]: {error.message}", error.hint) from None
        return made

    generator = Generator(model)
    for number in range(len(items)):
        request(number)
    left = iter(range(len(items)))
    pending: dict[int, tuple[int, Ask, list[np.ndarray]]] = {}
    found: dict[int, list[Scored]] = {}
    while len(found) < len(items):
        progress.report("asking labelled questions", len(found), len(items))
        # Only a few requests are prepared ahead of time, because decoded images are large.
        for number in islice(left, 2 * generator.max_batch - len(pending)):
            ask, right, made = request(number)
            pending[generator.add(made, is_checked=True)] = number, ask, right
        for event in generator.step():
            if isinstance(event, Finished):
                assert isinstance(event.result, DecisionResult)
                number, ask, right = pending.pop(event.id)
                group = str(items[number].get("group") or "")
                answers = zip(ask.questions, event.result.draws, right, strict=True)
                found[number] = [Scored(each.type, group, *of) for each, *of in answers]
    return [each for number in range(len(items)) for each in found[number]]


def _request(
    item: Json, model: Model, tokenizer: Tokenizer, reading: Json, number: int
) -> tuple[Ask, list[np.ndarray], DecisionRequest]:
    listed = item.get("questions")
    if not isinstance(listed, list):
        raise CanvasError("questions is not a list", "give at least one question")
    labels = ("answer", "probabilities")
    plain = [
        {name: value for name, value in each.items() if name not in labels}
        if isinstance(each, Mapping)
        else each
        for each in listed
    ]
    layout = item.get("layout", "letters")
    ask = Ask.from_json({"questions": plain, **reading, "layout": layout})
    right = [
        right_of(question, each, f"questions[{i}]")
        for i, (question, each) in enumerate(zip(ask.questions, listed, strict=True))
    ]
    files = item.get("images", [])
    if files:
        model.check_vision()
    assert model.config.vision is not None or not files
    most = item.get("image_tokens", max(BUDGETS))
    pictures = [read_picture(file, model.config.vision or {}, most) for file in files]
    parts: list[Json] = [{"type": "image"} for _ in files]
    text = item.get("input") or ""
    if text or not files:
        parts.append({"type": "text", "text": text_of(text, "input")})
    content = parts if files else parts[0]["text"]
    chat = [{"role": "user", "content": content}]
    return ask, right, ask.request(chat, model, tokenizer, number, pictures)


def right_of(question: Question, label: Mapping[str, Any], path: str) -> np.ndarray:
    """Return each option's probability of being right: from the label's `probabilities`, or else 1 for its `answer` and
    0 for the other options.

    The answer is true or false for a predicate, a value for a choice, and a label for a score.
    """
    options: list[Any] = [each.value for each in question.options]
    if "probabilities" in label:
        shares = label["probabilities"]
        numbers = isinstance(shares, list) and all(type(each) in (int, float) for each in shares)
        if not numbers or len(shares) != len(options):
            raise CanvasError(
                f"{path}.probabilities must have one number per option", f"give {len(options)}"
            )
        right = np.array(shares, np.float64)
        if not (right >= 0).all() or not abs(right.sum() - 1) <= 1e-6:
            raise CanvasError(
                f"{path}.probabilities do not add up to 1", "give probabilities that add up to 1"
            )
        return right
    answer = label.get("answer")
    if question.type == "predicate":
        options, valid = [True, False], isinstance(answer, bool)
    else:
        valid = any(answer == each and type(answer) is type(each) for each in options)
    if not valid:
        raise CanvasError(
            f"{path}.answer is {answer!r}", f"give one of {', '.join(map(str, options))}"
        )
    return np.eye(len(options))[options.index(answer)]
