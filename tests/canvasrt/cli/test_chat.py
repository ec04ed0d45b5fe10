"""`canvasrt chat`: a conversation with a server, with standard input from a script and on a terminal."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.containers.serve.frontend import FrontEnd
from tests.canvasrt.cli.conftest import Terminal, fails
from tests.conftest import Command
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
SHORT = ("--seed", "7", "--max-new-tokens", "40", "--steps", "6")


@pytest.fixture
def chat(front: FrontEnd, here: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that holds a conversation without a terminal and returns the output."""

    def say(text: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        done = here("chat", "--url", front.url, *SHORT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return say


def answer(openai: Any, *texts: str) -> str:
    """Return the answer to the last message. The roles of messages alternate."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    reply = openai.chat.completions.create(
        model="canvasrt",
        messages=messages,
        seed=7,
        max_tokens=40,
        extra_body={"max_denoising_steps": 6},
    )
    return str(reply.choices[0].message.content)


def test_every_line_is_a_message_of_one_conversation_until_it_starts_over(
    chat: Callable[[str], str], openai: Any
) -> None:
    first, alone = answer(openai, "12+34="), answer(openai, "sort 4017")
    second = answer(openai, "12+34=", first, "sort 4017")
    assert chat("12+34=\n\nsort 4017\n/new\nsort 4017\n") == f"{first}\n{second}\n{alone}\n"


def on_a_terminal(front: FrontEnd, *options: str) -> Terminal:
    return Terminal("chat", "--url", front.url, *SHORT, *options)


def interrupt_until_it_ends(terminal: Terminal) -> None:
    """Send signals until the command ends. A signal between prompt and read takes effect only at the next key or
    signal."""
    while terminal.running.poll() is None:
        terminal.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.running.wait(5)


def test_a_terminal_shows_the_drafts_and_keeps_the_answer(front: FrontEnd, openai: Any) -> None:
    with on_a_terminal(front) as terminal:
        assert "Ctrl-D ends" in terminal.until("> ")
        terminal.type("/exit\n")
        terminal.until("/exit is not a command")
        terminal.until("> ")
        terminal.type("12+34=\n")
        terminal.until("block 1, step 1")
        terminal.until("block 2, step 6")
        text = terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end()[1] == 0
    erased = text.rpartition("\x1b[2K")[2]
    assert answer(openai, "12+34=").replace("\n", "") in erased.replace("\n", "")


def test_an_interrupt_ends_the_answer_and_then_the_chat(front: FrontEnd) -> None:
    long = ("--max-new-tokens", "320", "--steps", "500")
    with on_a_terminal(front, *long) as terminal:
        terminal.until("> ")
        terminal.type("12+34=\n")
        terminal.until("block 1, step 2")
        terminal.interrupt()
        assert "block 10, step" not in terminal.until("stopped")
        terminal.until("> ")
        terminal.type("sort 4017\n")
        terminal.until("block 1, step 2")
        terminal.interrupt()
        terminal.until("stopped")
        terminal.until("> ")
        interrupt_until_it_ends(terminal)
        assert terminal.end()[1] == 130


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"x\n", "no OpenAI API answers at"), (b"\xff\n", "standard input is not UTF-8")],
)
def test_what_it_cannot_send(
    here: Command, monkeypatch: pytest.MonkeyPatch, text: bytes, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))
    fails(here("chat", "--url", "127.0.0.1:9"), said)


def test_help_is_not_sent_and_a_blank_answer_is_explained(
    chat: Callable[[str], str], openai: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat("/help\n12+34=\n").partition("\n")[2] == answer(openai, "12+34=") + "\n"
    monkeypatch.setattr(OpenAIClient, "stream", lambda self, inputs: iter(()))
    told = io.StringIO()
    monkeypatch.setattr("canvasrt.cli.chat.print_error", lambda *told_: told.write(str(told_)))
    chat("12+34=\n")
    assert "/new starts over" in told.getvalue()
