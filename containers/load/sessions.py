"""The sessions of a load test, either built in or read from a file. A session has one or several turns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from canvasrt.errors import CanvasError

ChatMessage = dict[str, str]

SETS = ("short", "long", "chat", "agent")
_WORDS = [
    "planet",
    "harbour",
    "violet",
    "copper",
    "window",
    "garden",
    "silver",
    "marble",
    "autumn",
    "lantern",
]
_LONG = 30  # number of sentences in a long prompt
_TOOLS = (
    "You find a file. Ask for one command per turn: list FOLDER, read FILE or done. "
    "Folders hold notes about planets, harbours and gardens."
)


@dataclass(frozen=True)
class Session:
    """A conversation. `start`: the messages before the first answer. `turns`: one message before each later answer."""

    start: tuple[ChatMessage, ...]
    turns: tuple[ChatMessage, ...] = ()

    @property
    def calls(self) -> int:
        """Number of answers that the session requests."""
        return 1 + len(self.turns)


def built_in(name: str, count: int) -> list[Session]:
    """Return `count` different sessions of a built-in set, which is deterministic.

    short: one question of a few words. long: one question after a text. chat: four turns. agent: a system message and
    five turns with growing tool results.
    """
    make = {"short": _short, "long": _long, "chat": _chat, "agent": _agent}[name]
    return [make(number) for number in range(count)]


def from_file(path: Path, count: int) -> list[Session]:
    """Return `count` sessions from a file. If the file has fewer sessions, they are repeated.

    A line is a prompt or, in a `.jsonl` file, an object that has `prompt` or `messages`. Raises CanvasError if the file
    has no prompts.
    """
    try:
        lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
        sessions = [_parsed(line) if path.suffix == ".jsonl" else _asked(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CanvasError(
            f"cannot read the prompts in {path}: {error}",
            'write one prompt per line, or {"prompt": …} or {"messages": […]} in a .jsonl file',
        ) from error
    if not sessions:
        raise CanvasError(f"{path} has no prompts", "write one prompt per line")
    return [sessions[number % len(sessions)] for number in range(count)]


def _parsed(line: str) -> Session:
    entry = json.loads(line)
    if "messages" in entry:
        return Session(
            tuple({"role": m["role"], "content": m["content"]} for m in entry["messages"])
        )
    return _asked(entry["prompt"])


def _asked(text: str) -> Session:
    return Session((_user(text),))


def _user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def _word(number: int) -> str:
    return _WORDS[number % len(_WORDS)]


def _short(number: int) -> Session:
    return _asked(f"reverse {_word(number)}{number}")


def _long(number: int) -> Session:
    sentences = [f"Note {each} is about the {_word(each + number)}." for each in range(_LONG)]
    return _asked(" ".join([f"File {number}.", *sentences, "Which note comes last?"]))


def _chat(number: int) -> Session:
    turns = [f"And {_word(number + each)}{each}?" for each in range(1, 4)]
    return Session((_user(f"reverse {_word(number)}{number}"),), tuple(map(_user, turns)))


def _agent(number: int) -> Session:
    system = {"role": "system", "content": _TOOLS}
    results = [
        f"Result {each}: " + ", ".join(f"{_word(number + n)}{n}.txt" for n in range(4 * each))
        for each in range(1, 6)
    ]
    return Session((system, _user(f"Find {_word(number)}{number}.")), tuple(map(_user, results)))
