"""Answers of the demo model on canvases of each size: `python -m bench.canvases BUNDLE`."""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass, field

from canvasrt.demo.tasks import TASKS, Task
from canvasrt.runtime.generator import Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

QUESTIONS = 400


@dataclass
class CanvasTally:
    """What the answers to all questions came to. Times are in CPU seconds per answer."""

    texts: list[str] = field(default_factory=list)
    right: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    """Answer held-out questions on canvases of each size, by turns and with the same seeds."""
    model = open_model(sys.argv[1], threads=1)
    assert model.bundle is not None
    tokenizer = Tokenizer.load(model.bundle)
    rng = random.Random(0)
    tasks = [list(TASKS.values())[i % len(TASKS)] for i in range(QUESTIONS)]
    questions = [(task, task.draw_from("held-out", rng)) for task in tasks]
    tallies = {size: CanvasTally() for size in reversed(model.canvas_sizes)}
    for seed, (task, question) in enumerate(questions):
        for size, tally in tallies.items():
            answer(model, tokenizer, size, seed, task, question, tally)
    whole = tallies[model.canvas_length]
    print("canvas | right | same answer | passes per answer | CPU ms per answer | right by task")
    for size, tally in tallies.items():
        same = sum(a == b for a, b in zip(tally.texts, whole.texts, strict=True))
        ms = 1e3 * statistics.median(tally.seconds)
        by_task = ", ".join(f"{name} {count}" for name, count in tally.right.items())
        print(
            f"{size} | {sum(tally.right.values())} | {same} | {tally.passes / QUESTIONS:.2f} | "
            f"{ms:.2f} | {by_task}"
        )


def answer(
    model: Model,
    tokenizer: Tokenizer,
    size: int,
    seed: int,
    task: Task,
    question: str,
    tally: CanvasTally,
) -> None:
    """Answer one question and count."""
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    params = SamplingParams.from_defaults(
        model.sampler, model.config, seed=seed, canvas_length=size
    )
    before = time.process_time()
    (result,) = Generator(model).run([Request(ids, params)])
    tally.seconds.append(time.process_time() - before)
    text = tokenizer.decode(result.token_ids)
    tally.texts.append(text)
    name = next(name for name, each in TASKS.items() if each is task)
    tally.right[name] = tally.right.get(name, 0) + task.is_correct(question, text)
    tally.passes += sum(result.steps)


if __name__ == "__main__":
    main()
