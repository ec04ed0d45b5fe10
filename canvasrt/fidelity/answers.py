"""Compares both sides as users see them: whole generations with early stop, on the same prompts and noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from canvasrt.demo.reply import MAX_NEW_TOKENS
from canvasrt.demo.tasks import TASKS, is_correct
from canvasrt.fidelity.prompts import PromptSet, chats, spread
from canvasrt.fidelity.reference import ReferenceModel
from canvasrt.fidelity.stats import paired_loss, ratio_interval, wilson
from canvasrt.progress import Progress
from canvasrt.runtime.generator import Finished, Generator, Request, Result
from canvasrt.runtime.model import Model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

# Seeds of generations. The compared steps use seeds from 0.
FIRST_SEED = 1_000
BATCH = 4


@dataclass
class GenerationTotals:
    """What generations took, with one entry per request on one side."""

    steps: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.steps.append(sum(result.steps))
        self.blocks.append(len(result.steps))
        self.tokens.append(len(result.token_ids))

    def to_json(self) -> dict[str, float]:
        """Return denoising steps per block, and new tokens per denoising pass, including
        end-of-sequence tokens."""
        return {
            "steps_per_block": sum(self.steps) / sum(self.blocks),
            "tokens_per_pass": sum(self.tokens) / sum(self.steps),
        }


@dataclass
class Pace:
    """Both sides' work on the same requests."""

    bundle: GenerationTotals = field(default_factory=GenerationTotals)
    reference: GenerationTotals = field(default_factory=GenerationTotals)

    def add(self, bundle: Result, reference: Result) -> None:
        self.bundle.add(bundle)
        self.reference.add(reference)

    def to_json(self) -> dict[str, Any]:
        """Return both sides, and by what share the bundle needs more steps per block."""
        ours, theirs = self.bundle.to_json(), self.reference.to_json()
        # Both sides nearly always generate the same number of blocks; only the steps vary.
        low, high = ratio_interval(self.bundle.steps, self.reference.steps)
        blocks = sum(self.reference.blocks) / sum(self.bundle.blocks)
        return {
            "requests": len(self.bundle.steps),
            "bundle": ours,
            "reference": theirs,
            "steps_growth": ours["steps_per_block"] / theirs["steps_per_block"] - 1,
            "steps_growth_interval": [low * blocks - 1, high * blocks - 1],
        }


@dataclass
class Marks:
    """Both sides' right and wrong answers to the same questions."""

    both: int = 0
    lost: int = 0  # only the reference was right
    gained: int = 0  # only the bundle was right
    neither: int = 0

    def add(self, bundle: bool, reference: bool) -> None:
        self.both += bundle and reference
        self.lost += reference and not bundle
        self.gained += bundle and not reference
        self.neither += not (bundle or reference)

    @property
    def asked(self) -> int:
        return self.both + self.lost + self.gained + self.neither

    def to_json(self) -> dict[str, Any]:
        """Return shares from 0 to 1 with 95% intervals: Wilson's per side, a paired one for the loss."""
        asked = self.asked
        return {
            "asked": asked,
            **{
                side: {"right": right, "share": right / asked, "interval": wilson(right, asked)}
                for side, right in (
                    ("bundle", self.both + self.gained),
                    ("reference", self.both + self.lost),
                )
            },
            "lost": self.lost,
            "gained": self.gained,
            "loss": (self.lost - self.gained) / asked,
            "loss_interval": paired_loss(self.lost, self.gained, asked),
        }


@dataclass
class AnswerScores:
    """The demo's held-out questions, by task."""

    tasks: dict[str, Marks]
    pace: dict[str, Pace]

    def to_json(self) -> dict[str, Any]:
        """Return the results of all tasks together, and of each."""
        total = Marks()
        for marks in self.tasks.values():
            for name, count in vars(marks).items():
                setattr(total, name, getattr(total, name) + count)
        return {
            "all": total.to_json(),
            "tasks": [
                {"task": name, **marks.to_json(), "pace": self.pace[name].to_json()}
                for name, marks in self.tasks.items()
            ],
        }


def ask_questions(
    model: Model,
    reference: ReferenceModel,
    tokenizer: Tokenizer,
    questions: int,
    progress: Progress,
) -> tuple[AnswerScores, Pace]:
    """Ask both sides `questions` held-out questions per demo task."""
    asked = [(task, question) for task in TASKS for question in spread(task, questions)]
    prompts = PromptSet("questions", chats(tokenizer, [question for _, question in asked]))
    pairs = _generate(model, reference, prompts, MAX_NEW_TOKENS, progress)
    answers = AnswerScores({task: Marks() for task in TASKS}, {task: Pace() for task in TASKS})
    total = Pace()
    for (task, question), pair in zip(asked, pairs, strict=True):
        ours, theirs = (is_correct(question, tokenizer.decode(each.token_ids)) for each in pair)
        answers.tasks[task].add(ours, theirs)
        answers.pace[task].add(*pair)
        total.add(*pair)
    return answers, total


def compare_pace(
    model: Model, reference: ReferenceModel, prompts: PromptSet, progress: Progress
) -> Pace:
    """Continue every prompt on both sides, up to the checkpoint's own number of tokens."""
    pace = Pace()
    for pair in _generate(model, reference, prompts, None, progress):
        pace.add(*pair)
    return pace


def _generate(
    model: Model,
    reference: ReferenceModel,
    prompts: PromptSet,
    max_new_tokens: int | None,
    progress: Progress,
) -> list[tuple[Result, Result]]:
    """Return each prompt's result from the bundle and from the reference, under the same noise."""
    requests = [
        Request(
            tokens,
            SamplingParams.from_defaults(
                reference.sampler,
                reference.config,
                seed=FIRST_SEED + number,
                max_new_tokens=max_new_tokens,
            ),
        )
        for number, tokens in enumerate(prompts.tokens)
    ]
    ours = _run(model, requests, "generating with the bundle", progress)
    theirs = _run(reference, requests, "generating with transformers", progress)
    return list(zip(ours, theirs, strict=True))


def _run(side: Any, requests: Sequence[Request], what: str, progress: Progress) -> list[Result]:
    """Return every request's result, in order."""
    generator = Generator(side, side.max_batch or BATCH)
    # Prompts of one length run together: the reference takes them as a batch.
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_token_ids))
    added = {generator.add(requests[i]): i for i in order}
    results: dict[int, Result] = {}
    while not generator.idle:
        progress(what, len(results), len(requests))
        for event in generator.step():
            if isinstance(event, Finished):
                results[added[event.id]] = event.result
    progress(what, len(requests), len(requests))
    return [results[i] for i in range(len(requests))]
