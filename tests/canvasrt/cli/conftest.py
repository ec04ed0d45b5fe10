"""Models and servers for the commands, and a way to call one."""

import subprocess
from pathlib import Path

import pytest

from canvasrt.cli.app import run
from tests.conftest import Command
from tests.helpers.reference import demo, prompt, tiny, undertrained
from tests.helpers.serving import (
    _one_thread,
    engines,
    front,
    graphs,
    grpc,
    http,
    local,
    openai,
    packaged,
    server,
    tokenizer,
)

__all__ = [
    "_one_thread",
    "demo",
    "engines",
    "front",
    "graphs",
    "grpc",
    "http",
    "local",
    "openai",
    "packaged",
    "prompt",
    "server",
    "tiny",
    "tokenizer",
    "undertrained",
]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `canvasrt` in this process."""

    def call(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("COLUMNS", "120")
        if cwd is not None:
            monkeypatch.chdir(cwd)
        capsys.readouterr()
        code = run(list(map(str, arguments)))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call
