"""The questions that the demo checkpoint answers, and how an answer is checked.

A question is a prompt such as `12+34=`. A hash decides whether a question is for training or held
out, so no held-out question occurs in training, whatever the seed. This module needs only the standard library.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held-out"]

# The longest answer, counting through 31 numbers, takes nearly three blocks.
MAX_NEW_TOKENS = 128
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Task(ABC):
    """One kind of question. `many_answers` is whether a question has several right answers."""

    name: str
    pattern: re.Pattern[str]
    many_answers: bool = False
    held_out_one_in: int = 10

    @abstractmethod
    def draw(self, rng: random.Random) -> str:
        """Return a random prompt from either split. Hard questions are more frequent than in a uniform draw."""

    @abstractmethod
    def answer(self, prompt: str, rng: random.Random) -> str:
        """Return the right answer, or a random right answer if the question has several."""

    def all_prompts(self) -> Iterator[str] | None:
        """Return every prompt of the task, or None if there are too many to list."""
        return None

    def key(self, prompt: str) -> str:
        """Return the key that decides the split. Prompts with the same key are in the same split."""
        return prompt

    def is_correct(self, prompt: str, answer: str) -> bool:
        return answer == self.answer(prompt, random.Random(0))

    def parse(self, prompt: str) -> tuple[str, ...]:
        """Return the prompt's fields. Raises ValueError if the prompt is not one of this task's."""
        match = self.pattern.fullmatch(prompt)
        if match is None:
            raise ValueError(f"not a {self.name!r} question: {prompt!r}")
        return match.groups(default="")

    def split(self, prompt: str) -> Split:
        digest = hashlib.sha256(f"{self.name}:{self.key(prompt)}".encode()).digest()
        in_held_out = int.from_bytes(digest[:4], "big") % self.held_out_one_in == 0
        return "held-out" if in_held_out else "train"

    def draw_from(self, split: Split, rng: random.Random) -> str:
        while self.split(prompt := self.draw(rng)) != split:
            pass
        return prompt


@dataclass(frozen=True)
class Sum(Task):
    """``12+34=`` → ``46``, or ``12-34=`` → ``-22``"""

    sign: str = "+"

    def draw(self, rng: random.Random) -> str:
        return f"{_operand(rng)}{self.sign}{_operand(rng)}="

    def answer(self, prompt: str, rng: random.Random) -> str:
        a, b = map(int, self.parse(prompt))
        return str(a + b if self.sign == "+" else a - b)

    def all_prompts(self) -> Iterator[str]:
        return (f"{a}{self.sign}{b}=" for a in range(100) for b in range(100))

    def key(self, prompt: str) -> str:
        if self.sign == "-":
            return prompt
        a, b = sorted(self.parse(prompt))  # 34+12= would reveal the answer to 12+34=
        return f"{a}+{b}"


@dataclass(frozen=True)
class Word(Task):
    """``reverse planet`` → ``tenalp``, or ``upper hello`` → ``HELLO``"""

    change: Callable[[str], str] = str

    def draw(self, rng: random.Random) -> str:
        return f"{self.name} {_word(rng)}"

    def answer(self, prompt: str, rng: random.Random) -> str:
        return self.change(self.parse(prompt)[0])


class Sort(Task):
    """``sort 40172`` → ``01247``"""

    def draw(self, rng: random.Random) -> str:
        # Few distinct digits mean many repeats, which are harder to get right.
        digits = rng.sample(string.digits, k=rng.randint(2, 10))
        return "sort " + "".join(rng.choices(digits, k=rng.randint(3, 8)))

    def answer(self, prompt: str, rng: random.Random) -> str:
        return "".join(sorted(self.parse(prompt)[0]))

    def key(self, prompt: str) -> str:
        return self.answer(prompt, random.Random(0))


class Count(Task):
    """``count 7 to 10`` → ``7 8 9 10``; long answers take several blocks."""

    spans = range(2, 31)

    def draw(self, rng: random.Random) -> str:
        span = rng.choice(self.spans)
        start = rng.randint(0, 99 - span)
        if rng.random() < 0.2:  # counting from one digit to two is rarer, and harder
            start = rng.randint(0, 9)
        return f"count {start} to {start + span}"

    def answer(self, prompt: str, rng: random.Random) -> str:
        start, end = map(int, self.parse(prompt))
        return " ".join(map(str, range(start, end + 1)))

    def all_prompts(self) -> Iterator[str]:
        return (
            f"count {start} to {start + span}" for span in self.spans for start in range(100 - span)
        )


class Shuffle(Task):
    """``shuffle abdeg`` → the same letters in any order"""

    def draw(self, rng: random.Random) -> str:
        return "shuffle " + "".join(rng.sample(string.ascii_lowercase, k=rng.randint(4, 6)))

    def answer(self, prompt: str, rng: random.Random) -> str:
        letters = self.parse(prompt)[0]
        return "".join(rng.sample(letters, k=len(letters)))

    def key(self, prompt: str) -> str:
        return "".join(sorted(self.parse(prompt)[0]))

    def is_correct(self, prompt: str, answer: str) -> bool:
        return sorted(answer) == sorted(self.parse(prompt)[0])


class Brackets(Task):
    """``brackets 8 ([`` → any balanced string of 8 brackets that begins with ``([``"""

    lengths = (8, 10)
    longest_opening = 3

    def draw(self, rng: random.Random) -> str:
        length = rng.choice(self.lengths)
        opening = _balanced(length, rng)[: rng.randint(0, self.longest_opening)]
        return f"brackets {length} {opening}".rstrip()

    def answer(self, prompt: str, rng: random.Random) -> str:
        length, opening = self.parse(prompt)
        return _balanced(int(length), rng, opening)

    def all_prompts(self) -> Iterator[str]:
        openings = [""]
        for opening in openings:
            if len(opening) < self.longest_opening:
                unclosed = _unclosed(opening) or ""
                openings += [opening + bracket for bracket in (*BRACKETS, *unclosed[-1:])]
        return (f"brackets {n} {opening}".rstrip() for n in self.lengths for opening in openings)

    def is_correct(self, prompt: str, answer: str) -> bool:
        length, opening = self.parse(prompt)
        return len(answer) == int(length) and answer.startswith(opening) and _unclosed(answer) == ""


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Sum("add", re.compile(r"(\d{1,2})\+(\d{1,2})=")),
        Sum("subtract", re.compile(r"(\d{1,2})-(\d{1,2})="), sign="-"),
        Word("reverse", re.compile(r"reverse ([a-z]+)"), change=lambda word: word[::-1]),
        Sort("sort", re.compile(r"sort (\d+)")),
        Word("upper", re.compile(r"upper ([a-z]+)"), change=str.upper),
        Count("count", re.compile(r"count (\d+) to (\d+)")),
        Shuffle("shuffle", re.compile(r"shuffle ([a-z]+)"), many_answers=True),
        # There are few bracket questions, so a larger share is held out.
        Brackets(
            "brackets",
            re.compile(r"brackets (\d+)(?: ([()\[\]{}]+))?"),
            many_answers=True,
            held_out_one_in=4,
        ),
    )
}


def questions(task: str, split: Split = "held-out") -> list[str]:
    """Return the prompts of a split: all prompts if the task can list them, otherwise 500 prompts, always the same."""
    chosen = TASKS[task]
    prompts = chosen.all_prompts()
    if prompts is not None:
        return [prompt for prompt in prompts if chosen.split(prompt) == split]
    rng = random.Random(f"{task}:{split}:0")
    drawn: dict[str, None] = {}  # a dict, because it keeps the order
    while len(drawn) < 500:
        drawn[chosen.draw_from(split, rng)] = None
    return list(drawn)


def task_of(prompt: str) -> Task:
    """Return the task that a prompt belongs to. Raises ValueError if no task has such prompts."""
    for task in TASKS.values():
        if task.pattern.fullmatch(prompt):
            return task
    raise ValueError(f"no task asks {prompt!r}; the tasks are {', '.join(TASKS)}")


def is_correct(prompt: str, answer: str) -> bool:
    """Return whether `answer` is exactly a right answer to `prompt`."""
    return task_of(prompt).is_correct(prompt, answer)


def _operand(rng: random.Random) -> int:
    return rng.randint(0, 9) if rng.random() < 0.15 else rng.randint(0, 99)


def _word(rng: random.Random) -> str:
    """Return a word of 3 to 9 letters. Half of the words are pronounceable; the rest are random letters."""
    length = rng.randint(3, 9)
    if rng.random() < 0.5:
        return "".join(rng.choices(string.ascii_lowercase, k=length))
    first = rng.randint(0, 1)
    kinds = (CONSONANTS, VOWELS)
    return "".join(rng.choice(kinds[(first + i) % 2]) for i in range(length))


def _balanced(length: int, rng: random.Random, opening: str = "") -> str:
    """Return a balanced string that begins with `opening`, generated from left to right."""
    text, closers = opening, _unclosed(opening)
    if closers is None:
        raise ValueError(f"no balanced string begins with {opening!r}")
    while len(text) < length:
        must_close = len(closers) == length - len(text)
        if closers and (must_close or rng.random() < 0.5):
            text, closers = text + closers[-1], closers[:-1]
        else:
            bracket = rng.choice(tuple(BRACKETS))
            text, closers = text + bracket, closers + BRACKETS[bracket]
    return text


def _unclosed(text: str) -> str | None:
    """Return the closing brackets that `text` still needs, the last one first; None if a closing bracket in `text` is
    wrong."""
    closers = ""
    for character in text:
        if character in BRACKETS:
            closers += BRACKETS[character]
        elif closers and character == closers[-1]:
            closers = closers[:-1]
        else:
            return None
    return closers
