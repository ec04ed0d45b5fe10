"""`canvasrt chat`: a conversation with a server, from a script and on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import Any

from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
SHORT = ("--seed", "7", "--max-new-tokens", "40", "--steps", "6")


def command(front: FrontEnd, *options: str) -> list[str]:
    return [sys.executable, "-m", "canvasrt", "chat", "--url", front.url, *SHORT, *options]


def chat(front: FrontEnd, text: str, *options: str) -> str:
    done = subprocess.run(
        command(front, *options), input=text, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_every_line_is_a_message_of_one_conversation(front: FrontEnd, openai: Any) -> None:
    first = answer(openai, "12+34=")
    second = answer(openai, "12+34=", first, "sort 4017")
    assert chat(front, "12+34=\n\nsort 4017\n") == f"{first}\n{second}\n"


def test_it_can_start_over(front: FrontEnd, openai: Any) -> None:
    first, alone = answer(openai, "12+34="), answer(openai, "sort 4017")
    assert chat(front, "12+34=\n/new\nsort 4017\n") == f"{first}\n{alone}\n"


def test_a_terminal_shows_the_drafts_and_keeps_the_answer(front: FrontEnd, openai: Any) -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    running = subprocess.Popen(
        command(front), stdin=child, stdout=child, stderr=child, env=environment, close_fds=True
    )
    os.close(child)
    shown = b""
    sent = 0
    messages = (b"12+34=\n", b"\x04")
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # the terminal's other side is closed
            break
        shown += piece
        if sent < len(messages) and shown.count(b"> ") > sent:
            os.write(parent, messages[sent])
            sent += 1
    assert running.wait(timeout=60) == 0
    text = shown.decode().replace("\r\n", "\n")
    assert "Ctrl-D ends" in text
    assert "block 1, step 1" in text
    assert "block 2, step 6" in text
    erased = text.rpartition("\x1b[2K")[2]
    assert answer(openai, "12+34=").replace("\n", "") in erased.replace("\n", "")


def test_without_a_server_it_says_so() -> None:
    words = [sys.executable, "-m", "canvasrt", "chat", "--url", "127.0.0.1:9"]
    done = subprocess.run(words, input="x\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no server answers openai at" in done.stderr
