"""Training examples of the second phase: known probabilities, closed questions, and pictures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from bench.demo.data import TrainingBatch
from bench.demo.model import PATCH, POOL
from bench.demo.tokenizer import (
    IMAGE_END,
    IMAGE_ID,
    IMAGE_START,
    NEWLINE,
    PAD,
    TURN_END_ID,
    chat_prompt,
)
from canvasrt.demo.dots import COLORS, DOTS_PROMPTS, Dots, draw_dots, questions_of, right_answer
from canvasrt.demo.odds import CASES, Case, ClosedQuestion, count_options, draw_case
from canvasrt.runtime.answers.layout import letters, with_questions
from canvasrt.runtime.answers.questions import read_questions

MIXTURE_WEIGHTS = {"coin": 1.0, "odds": 1.2, "wheel": 1.2, "draw": 1.4, "compare": 1.2}
MOST_QUESTIONS = 2


@dataclass(frozen=True)
class Example:
    """One example: a prefix, a right block, and the probabilities of its tokens before it is generated.

    targets: the probability of every token at every position, given the prefix alone. slots: positions where several
    tokens are possible; a read has noise there.
    """

    task: str
    prefix: list[int]
    block: list[int]
    targets: Tensor  # [canvas, vocabulary]
    slots: Tensor  # bool [canvas]
    picture: Dots | None = None


class Mixture:
    """A seeded stream of second-phase examples from the training split."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, canvas_length: int, seed: int) -> None:
        self.rng = random.Random(f"mixture:{seed}")
        self.canvas_length = canvas_length
        self.vocab = tokenizer.get_vocab()
        around = chat_prompt(tokenizer, "?")
        place = around.index(self.vocab["?"])
        self.before, self.after = around[:place], around[place + 1 :]

    def plain(self, count: int) -> list[TrainingBatch]:
        """Return plain chats with known probabilities."""
        return [self._collate([self._plain(self._case()) for _ in range(count)])]

    def closed(self, count: int) -> list[TrainingBatch]:
        """Return chats with one to three closed questions, whose answers are letters."""
        made = sorted(
            (self._closed(self._case()) for _ in range(count)), key=lambda e: len(e.prefix)
        )
        return [self._collate(made[: count // 2]), self._collate(made[count // 2 :])]

    def pictures(self, plain: int, closed: int, soft_tokens: int) -> list[TrainingBatch]:
        """Return plain chats and closed questions about pictures of at most `soft_tokens` each."""
        sizes = ((plain, self._named), (closed, self._read_off))
        made = [[make(soft_tokens) for _ in range(count)] for count, make in sizes if count]
        return [self._with_pixels(examples, soft_tokens) for examples in made]

    def _with_pixels(self, examples: Sequence[Example], soft_tokens: int) -> TrainingBatch:
        images = [each.picture.pixels for each in examples if each.picture]
        seen = image_processor(soft_tokens)(images, return_tensors="pt")
        return replace(
            self._collate(examples),
            pixels=seen["pixel_values"].float(),
            places=seen["image_position_ids"],
        )

    def _case(self) -> Case:
        name = self.rng.choices(list(MIXTURE_WEIGHTS), weights=list(MIXTURE_WEIGHTS.values()))[0]
        return draw_case(name, "train", self.rng)

    def _plain(self, case: Case) -> Example:
        answers = [[*self._ids(text), TURN_END_ID] for text in case.outcomes]
        prefix = [*self.before, *self._ids(case.prompt), *self.after]
        return self._example(
            case.task, prefix, answers, case.probabilities, case.draw(self.rng), None
        )

    def _closed(self, case: Case) -> Example:
        count = self.rng.randint(1, min(MOST_QUESTIONS, len(case.questions)))
        questions = self.rng.sample(case.questions, count)
        prefix = [*self.before, *self._ids(asking(case.state, questions)), *self.after]
        answers = [
            self._ids(lettered(questions, outcome)) + [TURN_END_ID]
            for outcome in range(len(case.outcomes))
        ]
        chosen = case.draw(self.rng)
        return self._example(case.task, prefix, answers, case.probabilities, chosen, None)

    def _named(self, soft_tokens: int) -> Example:
        picture = draw_dots(self.rng)
        text = self.rng.choice(DOTS_PROMPTS)
        return self._picture(picture, text, right_answer(picture, text), soft_tokens)

    def _read_off(self, soft_tokens: int) -> Example:
        picture = draw_dots(self.rng)
        known = questions_of(picture, self.rng)
        questions = self.rng.sample(known, self.rng.randint(1, len(known)))
        return self._picture(picture, asking("", questions), lettered(questions, 0), soft_tokens)

    def _picture(self, picture: Dots, text: str, answer: str, soft_tokens: int) -> Example:
        count = soft_token_count(picture, soft_tokens)
        image = [IMAGE_START, *[IMAGE_ID] * count, IMAGE_END]
        prefix = [*self.before, *image, *self._ids(text), *self.after]
        answers = [[*self._ids(answer), TURN_END_ID]]
        return self._example("pictures", prefix, answers, (1.0,), 0, picture)

    def _example(
        self,
        task: str,
        prefix: list[int],
        answers: Sequence[list[int]],
        probabilities: Sequence[float],
        chosen: int,
        picture: Dots | None,
    ) -> Example:
        """Return an example from the possible answers and their probabilities; its block is the answer with index
        `chosen`."""
        blocks = torch.tensor([each + [PAD] * (self.canvas_length - len(each)) for each in answers])
        targets = torch.zeros(self.canvas_length, len(self.vocab))
        for block, probability in zip(blocks, probabilities, strict=True):
            targets[torch.arange(self.canvas_length), block] += probability
        if picture is None:
            slots = (blocks != blocks[0]).any(0)
        else:
            slots = self._open(blocks[0])
        return Example(task, prefix, blocks[chosen].tolist(), targets, slots, picture)

    def _open(self, block: Tensor) -> Tensor:
        """Return which positions of an answer about a picture are open: each letter after a space, or one whole
        word."""
        behind = torch.cat([torch.tensor([False]), block[:-1] == self.vocab[" "]])
        if behind.any():
            return behind
        width = 1 if block[1] == TURN_END_ID else 1 + max(map(len, COLORS))
        return torch.arange(self.canvas_length) < width

    def _collate(self, examples: Sequence[Example]) -> TrainingBatch:
        longest = max(len(each.prefix) for each in examples)
        rows = [[PAD] * (longest - len(each.prefix)) + each.prefix for each in examples]
        lengths = torch.tensor([len(each.prefix) for each in examples])
        return TrainingBatch(
            prefix=torch.tensor(rows),
            padding=torch.arange(longest)[None] < longest - lengths[:, None],
            block=torch.tensor([each.block for each in examples]),
            tasks=torch.tensor([MIXTURE_NAMES.index(each.task) for each in examples]),
            targets=torch.stack([each.targets for each in examples]),
            slots=torch.stack([each.slots for each in examples]),
        )

    def _ids(self, text: str) -> list[int]:
        return [NEWLINE if each == "\n" else self.vocab[each] for each in text]


MIXTURE_NAMES = (*CASES, "pictures")


def asking(state: str, questions: Sequence[ClosedQuestion]) -> str:
    """Return the message that asks closed questions about a state, as `/v1/decisions` sends it."""
    read = read_questions([each.data for each in questions])
    (message,) = with_questions([{"role": "user", "content": state}], read)
    return str(message["content"]).strip()


def lettered(questions: Sequence[ClosedQuestion], outcome: int) -> str:
    """Return the answer to closed questions: a numbered line with a letter for each."""
    lines = []
    for number, question in enumerate(questions, 1):
        names = letters(count_options(question.data))
        lines.append(f"{number}. {names[question.options[outcome]]}")
    return "\n".join(lines)


def image_processor(soft_tokens: int) -> Gemma4ImageProcessorPil:
    """Return transformers' image processor, configured for the demo's vision tower."""
    return Gemma4ImageProcessorPil(
        patch_size=PATCH, pooling_kernel_size=POOL, max_soft_tokens=soft_tokens
    )


def soft_token_count(picture: Dots, soft_tokens: int) -> int:
    """Return the number of soft tokens that the processor makes from a picture."""
    height, width = picture.pixels.shape[:2]
    size = get_aspect_ratio_preserving_size(height, width, PATCH, soft_tokens * POOL**2, POOL)
    return size[0] * size[1] // (PATCH * POOL) ** 2
