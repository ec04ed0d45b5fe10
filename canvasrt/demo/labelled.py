"""Closed questions of the demo whose right probabilities are known, as `canvasrt verify --decisions`
reads them."""

from __future__ import annotations

import io
import random
from typing import Any

from canvasrt.demo.dots import draw_dots, questions_of
from canvasrt.demo.odds import CASES, cases
from canvasrt.extras import require


def labelled(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` held-out cases per task, asked with letters and bare, and `count` pictures."""
    found = []
    for task in CASES:
        for case in cases(task, count, seed=seed):
            asked = [{**each.data, "probabilities": case.shares(each)} for each in case.questions]
            group = {"group": task}
            found.append({"input": case.state, "questions": asked, **group})
            whole = {
                "type": "choice",
                "instructions": "?",
                "choices": [{"value": value} for value in case.outcomes],
                "probabilities": list(case.probabilities),
            }
            bare = {"layout": "bare", "group": f"{task}, bare"}
            found.append({"input": case.prompt, "questions": [whole], **bare})
    rng = random.Random(f"pictures:held-out:{seed}")
    for _ in range(count):
        found.append(_picture(rng))
    return found


def _picture(rng: random.Random) -> dict[str, Any]:
    image = require("PIL.Image", "serve")
    dots = draw_dots(rng)
    file = io.BytesIO()
    image.fromarray(dots.pixels).save(file, "PNG")
    asked = []
    for each in questions_of(dots, rng):
        count = len(each.data.get("choices", "ab"))
        shares = [float(option == each.options[0]) for option in range(count)]
        asked.append({**each.data, "probabilities": shares})
    return {
        "input": "",
        "images": [file.getvalue()],
        "image_tokens": 70,
        "questions": asked,
        "group": "pictures",
    }
