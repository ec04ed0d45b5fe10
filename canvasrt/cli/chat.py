"""`canvasrt chat`: talks to a running server, and shows each answer while it is denoised."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.generate_output import live_region, tail
from canvasrt.cli.options import option
from canvasrt.cli.prompt import AnswerTimeout, System, with_sampling
from canvasrt.console import print_error
from canvasrt.containers.names import API_PORT
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import CanvasError

if TYPE_CHECKING:
    from rich.text import Text

    from canvasrt.containers.client.openai import OpenAIClient

NEW, HELP = "/new", "/help"
_HELP = f"{NEW} starts over, Ctrl-C stops an answer, Ctrl-D ends the chat"
_BLANK = f"{NEW} starts over; the demo model was trained on single questions"
Plain = Annotated[
    bool, typer.Option("--plain", help="Print text once it is final, without the drafts.")
]
ServerUrl = Annotated[
    str | None,
    option("--url", "HOST:PORT", "The server's address.", show_default=f"127.0.0.1:{API_PORT}"),
]


@partial(with_sampling, text_only=True)
def chat(
    url: ServerUrl = None,
    system: System = None,
    plain: Plain = False,
    *,
    sampling: dict[str, Any],
    timeout: AnswerTimeout = ANSWER_TIMEOUT,
) -> None:
    """Chat with a running server over the OpenAI API, in the terminal.

    /new starts over, /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat. Without a terminal, every line of standard input is a message.
    """
    from canvasrt.containers.client.openai import OpenAIClient

    client = OpenAIClient(url, timeout)
    drawn = sys.stdout.isatty() and not plain
    if sys.stdin.isatty():
        print(f"{client.model} at {client.url}; {_HELP}")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    for text in _lines():
        if text == NEW:
            messages = list(opening)
            continue
        if text == HELP:
            print(_HELP)
            continue
        if sys.stdin.isatty() and re.fullmatch(r"/[a-z]+", text):
            print_error(f"{text} is not a command", _HELP)
            continue
        messages.append({"role": "user", "content": text})
        inputs = {**sampling, "messages": json.dumps(messages)}
        try:
            answer = _draw(client, inputs) if drawn else _print(client, inputs)
        # Either exception closes the connection, so the server stops generating.
        except (CanvasError, KeyboardInterrupt) as error:
            if not sys.stdin.isatty():
                raise
            messages.pop()
            if isinstance(error, CanvasError):
                print_error(error.message, error.hint)
            else:
                print("\nstopped; this message is not part of the conversation")
            continue
        if not answer.strip():
            print_error("the answer is blank", _BLANK)
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """Yield the lines of input that are not empty."""
    if not sys.stdin.isatty():
        try:
            yield from (line.strip() for line in sys.stdin if line.strip())
        except UnicodeDecodeError:
            raise CanvasError("standard input is not UTF-8", "give it in UTF-8") from None
        return
    import readline  # noqa: F401 - adds history to `input`

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text:
            yield text


def _print(client: OpenAIClient, inputs: dict[str, Any]) -> str:
    """Print each piece of the answer once it is final. Return the whole answer."""
    answer = ""
    for piece in client.stream(inputs):
        print(piece, end="", flush=True)
        answer += piece
    print(flush=True)
    return answer


def _draw(client: OpenAIClient, inputs: dict[str, Any]) -> str:
    """Redraw the canvas in place at every step, then print the answer and return it."""
    answer = finished = ""
    with live_region() as live:
        for piece, draft in client.events(inputs, drafts=True):
            if draft is None:
                answer += piece
                continue
            if draft["step"] == 1:
                finished = answer
            live.update(tail(_canvas(finished, draft), live.console), refresh=True)
    print(answer, flush=True)
    return answer


def _canvas(finished: str, draft: dict[str, Any]) -> Text:
    """Return the finished blocks' text, then the canvas: settled tokens are bold, noise is dim."""
    from rich.text import Text

    drawn = Text(finished)
    for index in range(draft["end"]):
        if index < draft["settled"]:
            drawn.append(draft["best"][index], "bold")
        elif draft["accepted"][index]:
            drawn.append(draft["best"][index])
        else:
            drawn.append(draft["noisy"][index], "dim")
    drawn.append(f"\n  block {draft['block'] + 1}, step {draft['step']}", "cyan")
    return drawn
