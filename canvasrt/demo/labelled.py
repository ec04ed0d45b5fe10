"""The demo's closed questions, each with its answer or known probabilities, in the form that
`canvasrt verify --decisions` reads."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np

from canvasrt.demo.dots import COLORS, MOST_DOTS, Dots, draw_dots, questions_of
from canvasrt.demo.odds import CASES, Case, cases, count_options
from canvasrt.demo.tasks import TASKS, questions
from canvasrt.extras import require
from canvasrt.runtime.pictures import BUDGETS

_SUMS = ("add", "subtract")
_OFF = (1, -1, 10)  # differences between wrong options and the right sum


def labelled(count: int, more: bool) -> list[dict[str, Any]]:
    """Return up to `count` held-out sums and as many differences, as questions with one right option.

    If `more` is true, also return the second training phase's tasks: `count` cases of each task with known
    probabilities, and `count` pictures. The questions of these tasks have lettered options, or the bare layout.
    """
    found = [_sum(task, prompt) for task in _SUMS for prompt in questions(task)[::7][:count]]
    if more:
        for task in CASES:
            for case in cases(task, count):
                found += _known(case)
        rng = random.Random("pictures:held-out:0")
        for dots in [draw_dots(rng) for _ in range(count)]:
            found += _pictured(dots, rng)
    return found


def _sum(task: str, prompt: str) -> dict[str, Any]:
    right = int(TASKS[task].answer(prompt, random.Random(0)))
    values = [str(right + off) for off in (0, *_OFF)]
    return {**_bare("?", values, str(right)), "input": prompt, "group": f"{task}, bare"}


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


def _pictured(dots: Dots, rng: random.Random) -> list[dict[str, Any]]:
    """Return the questions about a picture: all of them with lettered options, then color and number in the bare
    layout. The bare color question is asked at the smallest and at the largest token budget."""
    image = {"images": [png(dots)], "image_tokens": min(BUDGETS)}
    questions = [
        {**each.data, "probabilities": np.eye(count_options(each.data))[each.options[0]].tolist()}
        for each in questions_of(dots, rng)
    ]
    color = _bare("color?", list(COLORS), dots.color)
    counted = _bare("dots?", [str(each + 1) for each in range(MOST_DOTS)], str(dots.count))
    full = {**image, "image_tokens": max(BUDGETS)}
    return [
        {"input": "", "questions": questions, "group": "pictures", **image},
        {**color, "group": "color, bare", **image},
        {**color, "group": f"color of {max(BUDGETS)} tokens, bare", **full},
        {**counted, "group": "dots, bare", **image},
    ]


def _bare(prompt: str, values: list[str], right: str) -> dict[str, Any]:
    question = {
        "type": "choice",
        "instructions": prompt,
        "choices": [{"value": value} for value in values],
        "answer": right,
    }
    return {"input": prompt, "layout": "bare", "questions": [question]}


def png(dots: Dots) -> bytes:
    """Return a picture as a PNG file."""
    image = require("PIL.Image", "serve")
    file = io.BytesIO()
    image.fromarray(dots.pixels).save(file, "PNG")
    return file.getvalue()
