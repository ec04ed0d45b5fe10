"""Models and servers for tests of commands, and ways to run a command: in this process and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from canvasrt.cli.app import run
from tests.conftest import Command


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `canvasrt` in this process."""

    def call(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("COLUMNS", "120")
        if cwd is not None:
            monkeypatch.chdir(cwd)
        capsys.readouterr()
        code = run(list(map(str, arguments)))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


Ask = Callable[..., str]


@pytest.fixture
def ask(here: Command) -> Ask:
    """Return a function that runs a command in this process, checks that it succeeds, and returns its standard
    output."""

    def call(*arguments: object) -> str:
        done = here(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def fails(done: subprocess.CompletedProcess[str], said: str, code: int = 1) -> str:
    """Check a failure's exit code and its message of two lines without a traceback. Return the hint."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    last = [line for line in lines if line.startswith(("error:", "hint:"))]
    assert [line.partition(":")[0] for line in last] == ["error", "hint"], done.stderr
    assert lines[-2:] == last
    assert re.search(said, last[0]), last[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return last[1]


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        size = {"TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
        self._parent, child = pty.openpty()
        self.running = subprocess.Popen(
            [sys.executable, "-m", "canvasrt", *map(str, arguments)],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, **size},
        )
        os.close(child)
        self._shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.kill()
        self.running.wait()
        os.close(self._parent)

    def until(self, text: str) -> str:
        """Read until the output contains `text`; return the output up to it."""
        while text not in self._shown and (piece := self._read()):
            self._shown += piece
        before, found, self._shown = self._shown.partition(text)
        assert found, f"never shown: {text!r}, after {before[-500:]!r}"
        return before + found

    def type(self, text: str) -> None:
        os.write(self._parent, text.encode())

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.running.send_signal(signal.SIGINT)

    def end(self) -> tuple[str, int]:
        """Wait for the end; return the remaining output and the exit code."""
        rest = self._shown
        while piece := self._read():
            rest += piece
        return rest, self.running.wait(timeout=60)

    def _read(self) -> str:
        assert select.select([self._parent], [], [], 60)[0], f"silent after {self._shown[-500:]!r}"
        try:
            return os.read(self._parent, 4096).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the command has closed the terminal
            return ""
