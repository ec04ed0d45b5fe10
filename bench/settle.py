"""How early text and answers are final with `settle_steps`, and what that changes:
`python -m bench.settle BUNDLE`."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field, replace

from canvasrt.demo.tasks import TASKS, Task
from canvasrt.runtime.generator import Block, Draft, Finished, Generator, Request, Settled
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

QUESTIONS = 300


@dataclass
class SettleTally:
    """What the answers to all questions had in common. `first` counts steps until the first text,
    `steps` all of them."""

    texts: list[str] = field(default_factory=list)
    right: int = 0
    first: int = 0
    steps: int = 0
    reopened: int = 0  # answers with an accepted token that changed later


def main() -> None:
    """Answer held-out questions of the demo model at several settings, with the same seeds."""
    model = open_model(sys.argv[1], threads=1)
    rng = random.Random(0)
    tasks = [list(TASKS.values())[i % len(TASKS)] for i in range(QUESTIONS)]
    questions = [(task, task.draw_from("held-out", rng)) for task in tasks]
    tallies = {wanted: tally(model, questions, wanted) for wanted in range(4)}
    print("settle_steps | steps to first text | steps | same answer | right | reopened")
    for wanted, found in tallies.items():
        same = sum(a == b for a, b in zip(found.texts, tallies[0].texts, strict=True))
        first, steps = found.first / QUESTIONS, found.steps / QUESTIONS
        print(f"{wanted} | {first:.1f} | {steps:.2f} | {same} | {found.right} | {found.reopened}")


def tally(model: Model, questions: list[tuple[Task, str]], settle_steps: int) -> SettleTally:
    """Answer every question and count."""
    tokenizer = Tokenizer.load(model.bundle) if model.bundle else None
    assert tokenizer is not None
    params = SamplingParams.from_defaults(model.sampler, model.config, settle_steps=settle_steps)
    found = SettleTally()
    for seed, (task, question) in enumerate(questions):
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        drafts: list[Draft] = []
        first = 0
        for event in Generator(model).stream(Request(ids, replace(params, seed=seed))):
            if isinstance(event, Draft):
                drafts.append(event)
            elif isinstance(event, Settled | Block):
                first = first or len(drafts)
            elif isinstance(event, Finished):
                text = tokenizer.decode(event.result.token_ids)
                found.steps += sum(event.result.steps)
        last = drafts[-1]
        same_block = [each for each in drafts if each.block == last.block]
        found.reopened += any((d.accepted & (d.tokens != last.tokens)).any() for d in same_block)
        found.texts.append(text)
        found.right += task.is_correct(question, text)
        found.first += first
    return found


if __name__ == "__main__":
    main()
