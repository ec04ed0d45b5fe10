"""`canvasrt chat`: a conversation with a server, from a script and on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.containers.serve.frontend import FrontEnd
from tests.conftest import Command
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
SHORT = ("--seed", "7", "--max-new-tokens", "40", "--steps", "6")


def command(front: FrontEnd, *options: str) -> list[str]:
    return [sys.executable, "-m", "canvasrt", "chat", "--url", front.url, *SHORT, *options]


@pytest.fixture
def chat(front: FrontEnd, here: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Hold a conversation without a terminal; return what it prints."""

    def say(text: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        done = here("chat", "--url", front.url, *SHORT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return say


def answer(openai: Any, *texts: str) -> str:
    """Return the answer to the last of the messages, whose roles take turns."""
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


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, front: FrontEnd, columns: int, rows: int, *options: str) -> None:
        size = {"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(rows)}
        self._parent, child = pty.openpty()
        self._running = subprocess.Popen(
            command(front, *options),
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, **size},
            close_fds=True,
        )
        os.close(child)
        self._shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.kill()
        self._running.wait()
        os.close(self._parent)

    def until(self, text: str) -> str:
        """Read until a text is shown; return the output up to it."""
        while text not in self._shown and (piece := self._read()):
            self._shown += piece
        before, found, self._shown = self._shown.partition(text)
        assert found, f"never shown: {text!r}, after {before[-500:]!r}"
        return before + found

    def type(self, text: str) -> None:
        os.write(self._parent, text.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        self._running.send_signal(signal.SIGINT)

    def interrupt_until_it_ends(self) -> None:
        """Interrupt repeatedly: a signal between prompt and read only takes effect at the next key or signal."""
        ended = False
        while not ended:
            self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(5)
                ended = True

    def end(self) -> tuple[str, int]:
        """Return what else is shown, and the exit code."""
        rest = self._shown
        while piece := self._read():
            rest += piece
        return rest, self._running.wait(timeout=60)

    def _read(self) -> str:
        assert select.select([self._parent], [], [], 60)[0], f"silent after {self._shown[-500:]!r}"
        try:
            return os.read(self._parent, 4096).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the terminal's other side is closed
            return ""


def test_a_terminal_shows_the_drafts_and_keeps_the_answer(front: FrontEnd, openai: Any) -> None:
    with Terminal(front, 100, 40) as terminal:
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
    with Terminal(front, 100, 40, *long) as terminal:
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
        terminal.interrupt_until_it_ends()
        assert terminal.end()[1] == 130


def test_without_a_server_it_says_so(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    done = here("chat", "--url", "127.0.0.1:9")
    assert done.returncode == 1
    assert "no OpenAI API answers at" in done.stderr


def test_help_is_not_sent_and_a_blank_answer_is_explained(
    chat: Callable[[str], str], openai: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat("/help\n12+34=\n").partition("\n")[2] == answer(openai, "12+34=") + "\n"
    monkeypatch.setattr(OpenAIClient, "stream", lambda self, inputs: iter(()))
    told = io.StringIO()
    monkeypatch.setattr("canvasrt.cli.chat.print_error", lambda *told_: told.write(str(told_)))
    chat("12+34=\n")
    assert "/new starts over" in told.getvalue()


def test_input_that_is_not_utf_8_is_named(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    done = here("chat")
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard input is not UTF-8")
