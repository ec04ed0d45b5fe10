"""Grammars are tried in a separate process, which can be ended and which ends with the server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.processes import children, is_running
from canvasrt.containers.triton import sandbox_process
from canvasrt.containers.triton.grammar_sandbox import GrammarSandbox
from canvasrt.errors import CanvasError, EngineError
from tests.helpers.serving import eventually

DIGITS = {"type": "regex", "regex": "[0-9]{2}"}
ENDLESS_GRAMMAR = {
    "type": "json_schema",
    "schema": {"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*b"} for n in range(60)]},
}


@pytest.fixture(scope="module")
def sandbox(engines: Bundle) -> Iterator[GrammarSandbox]:
    made = GrammarSandbox(engines.path, 112, (1, 5))
    yield made
    made._finalizer()


def test_a_grammar_that_takes_hours_is_refused(sandbox: GrammarSandbox) -> None:
    sandbox.check(DIGITS, ())
    with pytest.raises(CanvasError, match="more than 1 s of CPU time to compile"):
        sandbox.check(ENDLESS_GRAMMAR, ())
    sandbox.check(DIGITS, ())


def test_a_wrong_grammar_is_refused_as_without_a_trial(sandbox: GrammarSandbox) -> None:
    with pytest.raises(CanvasError, match="invalid regex"):
        sandbox.check({"type": "regex", "regex": "[0-9"}, ())
    with pytest.raises(CanvasError, match=r"grammar\.type is 3"):
        sandbox.check({"type": 3}, ())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_was_killed_or_stopped_is_started_again(
    sandbox: GrammarSandbox, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{GrammarSandbox.__module__}._PATIENCE", 3.0)
    before = sandbox.pid
    os.kill(before, number)
    sandbox.check(DIGITS, ())
    assert sandbox.pid != before
    assert not Path(f"/proc/{before}").exists()  # not even a zombie


def test_verdicts_do_not_change_places(
    sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller gets the verdict about another grammar, even if every replacement process is stopped, too."""
    for name in ("_PATIENCE", "_LOADING"):
        monkeypatch.setattr(f"{GrammarSandbox.__module__}.{name}", 2.0)
    end, stopped = threading.Event(), {sandbox.pid}
    os.kill(sandbox.pid, signal.SIGSTOP)

    def stop() -> None:
        while not end.wait(0.01):
            if (pid := sandbox.pid) not in stopped:
                stopped.add(pid)
                os.kill(pid, signal.SIGSTOP)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        with pytest.raises(EngineError, match="does not answer"):
            sandbox.check({"type": "regex", "regex": "[0-9"}, ())
    finally:
        end.set()
        stopping.join()
    monkeypatch.undo()
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    sandbox.check(DIGITS, ())
    with pytest.raises(CanvasError, match="CPU time"):
        sandbox.check(ENDLESS_GRAMMAR, ())
    sandbox.check(DIGITS, ())


def test_a_stopped_fork_holds_up_nobody(
    sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.check(DIGITS, ())
    monkeypatch.setattr(f"{GrammarSandbox.__module__}._PATIENCE", 6.0)
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(sandbox.check, ENDLESS_GRAMMAR, ())
        forks: list[int] = []
        # The fork's thread starts last, after the fork has set the signal for its parent's death.
        assert eventually(
            lambda: bool(forks.extend(filter(_compiles, children(sandbox.pid)[0])) or forks)
        )
        os.kill(forks[0], signal.SIGSTOP)
        monkeypatch.undo()  # a second of CPU time may take longer than 6 s
        sandbox.check(DIGITS, ())  # while the fork is stopped
        with pytest.raises(CanvasError, match="CPU time"):  # from the new fork
            endless.result(60)
    assert eventually(lambda: not is_running(forks[0]))


def crash(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(*_: Any) -> None:
    bytearray(1 << 40)


@pytest.mark.parametrize("does", [crash, fill])
def test_one_that_ends_the_compiler_is_refused(
    does: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_process, "compile_grammar", does)
    read, write = os.pipe()
    child = sandbox_process.fork({}, None, 0, write)  # type: ignore[arg-type]
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        assert not pipe.read()
    assert "1 GiB of memory" in sandbox_process.verdict_of(status)["message"]


def test_it_ends_with_the_server_and_has_none_of_its_secrets(
    engines: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANVASRT_API_KEYS", "a,b")
    code = f"""
from pathlib import Path
import time
from canvasrt.containers.triton.grammar_sandbox import GrammarSandbox
sandbox = GrammarSandbox(Path({str(engines.path)!r}), 112, (1, 5))
sandbox.check({DIGITS!r}, ())
print(sandbox.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert b"CANVASRT" not in Path(f"/proc/{pid}/environ").read_bytes()
        server.kill()
    assert eventually(lambda: not is_running(pid))


def _compiles(fork: int) -> bool:
    return len(list(Path(f"/proc/{fork}/task").glob("*"))) == 2
