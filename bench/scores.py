"""What scores of blocks find on a demo model, and what they cost: `python -m bench.scores BUNDLE`."""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from canvasrt.demo.tasks import TASKS, Task
from canvasrt.runtime.generator import Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "no score": {},
    "encoding pass": {"score_blocks": True},
    "denoising pass": {"score_blocks": True, "score_by_denoising": True},
}
SHARES = (0.25, 0.5)  # of the blocks, the lowest scores, that are redone
# The undertrained model answers the other tasks without errors.
UNSURE = ("add", "subtract", "count", "brackets")


@dataclass
class ScoreTally:
    """What happened to the questions, in their order."""

    right: list[bool] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    redone: int = 0
    steps: int = 0
    seconds: float = 0.0  # CPU time


class Asker:
    """Asks held-out questions of a demo model, always the same ones with the same seeds."""

    def __init__(self, model: Model, count: int) -> None:
        assert model.bundle is not None
        self._model = model
        self._tokenizer = Tokenizer.load(model.bundle)
        rng = random.Random(0)
        tasks = [TASKS[UNSURE[i % len(UNSURE)]] for i in range(count)]
        self.asked: list[tuple[Task, str]] = [(t, t.draw_from("held-out", rng)) for t in tasks]

    def ask(self, index: int, into: ScoreTally, **settings: Any) -> None:
        """Ask one question and count."""
        (task, question), model = self.asked[index], self._model
        params = SamplingParams.from_defaults(model.sampler, model.config, seed=index, **settings)
        ids = self._tokenizer.encode_chat([{"role": "user", "content": question}])
        begin = time.process_time()
        (result,) = Generator(model).run([Request(ids, params)])
        into.seconds += time.process_time() - begin
        into.right.append(task.is_correct(question, self._tokenizer.decode(result.token_ids)))
        into.scores += [each.score for each in result.block_scores[:1]]
        into.redone += sum(each.redone for each in result.block_scores)
        into.steps += sum(result.steps)


def ordered(asker: Asker, tally: ScoreTally) -> dict[str, tuple[int, float]]:
    """Return by task the number of wrong answers, and how often a right answer has a better score
    than a wrong one; 0.5 is chance. Tasks without both are left out."""
    right, wrong = defaultdict(list), defaultdict(list)
    for (task, _), ok, score in zip(asker.asked, tally.right, tally.scores, strict=True):
        (right if ok else wrong)[task.name].append(score)
    found = {}
    for name in UNSURE:
        if right[name] and wrong[name]:
            good, bad = np.array(right[name])[:, None], np.array(wrong[name])[None]
            found[name] = len(wrong[name]), float(((good > bad) + 0.5 * (good == bad)).mean())
    return found


say = partial(print, flush=True)


def main() -> None:
    """Ask, and print three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--questions", type=int, default=240)
    given = parser.parse_args()
    asker = Asker(open_model(given.bundle, threads=1), given.questions)
    tallies = {name: ScoreTally() for name in KINDS}
    for index in range(given.questions):  # by turns
        for name, settings in KINDS.items():
            asker.ask(index, tallies[name], **settings)
    plain = tallies["no score"]
    say("score by | CPU per answer, ms | against none")
    for name, tally in tallies.items():
        each = 1000 * tally.seconds / given.questions
        say(f"{name} | {each:.1f} | {tally.seconds / plain.seconds:.2f}")
    say("\nscore by | task | wrong | right scores above wrong")
    for name in list(KINDS)[1:]:
        for task, (wrong, share) in ordered(asker, tallies[name]).items():
            say(f"{name} | {task} | {wrong} | {share:.2f}")
    say("\nscore by | redo_below | right | redone | steps | CPU against none")
    say(f"none | | {sum(plain.right)} | 0 | {plain.steps} | 1.00")
    for name in list(KINDS)[1:]:
        for share in SHARES:
            bar = min(float(np.quantile(tallies[name].scores, share)), -1e-9)
            tally = ScoreTally()
            for index in range(given.questions):
                asker.ask(index, tally, **KINDS[name], redo_below=bar)
            say(
                f"{name} | {bar:.2g} | {sum(tally.right)} | {tally.redone} | {tally.steps} | "
                f"{tally.seconds / plain.seconds:.2f}"
            )


if __name__ == "__main__":
    main()
