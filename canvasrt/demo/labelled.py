"""Closed questions of the demo with their answers or known probabilities, as
`canvasrt verify --decisions` reads them."""

from __future__ import annotations

import io
import random
from typing import Any

from canvasrt.demo.dots import draw_dots, questions_of
from canvasrt.demo.odds import CASES, Case, cases
from canvasrt.demo.tasks import TASKS, questions
from canvasrt.extras import require

_SUMS = ("add", "subtract")
_OFF = (1, -1, 10)  # what wrong sums differ by


def labelled(count: int, more: bool, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` held-out sums and differences, each with wrong ones to choose from.

    With `more`, also what the second phase of the training teaches: `count` cases of each task with
    known probabilities, asked with letters and bare, and as many pictures.
    """
    found = [_sum(task, prompt) for task in _SUMS for prompt in questions(task)[::7][:count]]
    if more:
        for task in CASES:
            for case in cases(task, count, seed=seed):
                found += _known(case)
        rng = random.Random(f"pictures:held-out:{seed}")
        found += [_picture(rng) for _ in range(count)]
    return found


def _sum(task: str, prompt: str) -> dict[str, Any]:
    right = int(TASKS[task].answer(prompt, random.Random(0)))
    question = {
        "type": "choice",
        "instructions": "?",
        "choices": [{"value": str(right + off)} for off in (0, *_OFF)],
        "answer": str(right),
    }
    return {"input": prompt, "layout": "bare", "group": f"{task}, bare", "questions": [question]}


def _known(case: Case) -> list[dict[str, Any]]:
    questions = [{**each.data, "probabilities": case.shares(each)} for each in case.questions]
    whole = {
        "type": "choice",
        "instructions": "?",
        "choices": [{"value": value} for value in case.outcomes],
        "probabilities": list(case.probabilities),
    }
    bare = {"layout": "bare", "group": f"{case.task}, bare"}
    return [
        {"input": case.state, "questions": questions, "group": case.task},
        {"input": case.prompt, "questions": [whole], **bare},
    ]


def _picture(rng: random.Random) -> dict[str, Any]:
    image = require("PIL.Image", "serve")
    dots = draw_dots(rng)
    file = io.BytesIO()
    image.fromarray(dots.pixels).save(file, "PNG")
    questions = []
    for each in questions_of(dots, rng):
        count = len(each.data.get("choices", "ab"))
        shares = [float(option == each.options[0]) for option in range(count)]
        questions.append({**each.data, "probabilities": shares})
    return {
        "input": "",
        "images": [file.getvalue()],
        "image_tokens": 70,
        "questions": questions,
        "group": "pictures",
    }
