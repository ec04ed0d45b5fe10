"""Options that `generate`, `infer` and `chat` share: the prompt, the canvas, drafts and the time limit. The sampling
options are in `sampling.py`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from canvasrt.cli.options import argument, option, read_option
from canvasrt.defaults import MAX_SECONDS
from canvasrt.errors import CanvasError, UsageError
from canvasrt.runtime.sampling_params import MAX_INT32

PromptText = Annotated[
    str | None,
    argument("PROMPT", "The user's message; - reads it from stdin."),
]
PromptIds = Annotated[
    str | None,
    option("--prompt-ids", "3,4,5", "Token ids to continue as they are, instead of PROMPT."),
]
System = Annotated[
    str | None,
    option("--system", "TEXT", "The system message."),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue PROMPT as it is, without the chat template.")
]

Drafts = Annotated[
    bool,
    typer.Option("--drafts", help="Also print the draft of each step, in place on a terminal."),
]
CanvasJson = Annotated[
    str | None,
    option(
        "--canvas",
        "JSON",
        'Seed, pin or restrict the tokens at positions, as in {"pin": {"0": 17}}.',
    ),
]
AnswerTimeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.001,
        max=MAX_SECONDS,
        help="How long the whole answer may take.",
    ),
]


@dataclass(frozen=True)
class PromptInput:
    """A prompt: `ids` if they are set, otherwise `text`. Unless `raw` is true, `text` is a chat's message."""

    text: str = ""
    ids: list[int] | None = None
    system: str | None = None
    raw: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """The text as a chat, preceded by the system message if there is one."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.text}]


def read_prompt(
    text: str | None, ids: str | None = None, system: str | None = None, raw: bool = False
) -> PromptInput:
    """Return the prompt from a command's arguments. If `text` is `-`, it is read from stdin.

    Raises UsageError for no prompt, for an empty prompt, and for arguments that exclude each other.
    """
    if ids is not None:
        if text is not None or system is not None or raw:
            raise UsageError(
                "--prompt-ids is the whole prompt",
                "leave out PROMPT, --system and --raw, or leave out --prompt-ids",
            )
        return PromptInput(ids=_token_ids(ids))
    if text is None:
        raise UsageError("no prompt was given", "give PROMPT, - for stdin, or --prompt-ids 3,4,5")
    if raw and system is not None:
        raise UsageError("--raw does not allow --system", "leave out one of them")
    if not text.strip():
        raise UsageError("the prompt is empty", "give some text, or token ids with --prompt-ids")
    return PromptInput(read_text(text), system=system, raw=raw)


def read_text(text: str) -> str:
    """Return `text`, or standard input if `text` is `-`. Raises CanvasError if the result is empty or not UTF-8."""
    try:
        text = sys.stdin.read() if text == "-" else text
        text.encode()  # fails if the command line is not UTF-8: Python reads invalid bytes as surrogates
    except UnicodeError:
        raise UsageError("the prompt is not UTF-8", "give it in UTF-8") from None
    if not text.strip():
        raise CanvasError("the prompt is empty", "give some text on standard input")
    return text


def _token_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) <= MAX_INT32 for word in words):
        raise UsageError(
            f"--prompt-ids is not a list of token ids: {text!r}",
            "give whole numbers separated by commas: --prompt-ids 3,4,5",
        )
    return [int(word) for word in words]


def canvas_conditions(text: str | None, infill: str | None = None) -> Any:
    """Parse the conditions of --canvas. Raises UsageError if they are invalid or combined with --infill."""
    if text is None:
        return None
    if infill is not None:
        raise UsageError("--infill has a canvas of its own", "leave out --canvas")

    from canvasrt.runtime.conditions import read_conditions

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--canvas is not JSON: {error}", 'give {"pin": {"0": 17}}') from None
    return read_option(lambda: read_conditions(value))
