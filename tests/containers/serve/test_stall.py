"""How a hanging server is detected, with a heartbeat file and a `sleep` process instead of a server."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from canvasrt.containers.heartbeat import Heartbeat
from canvasrt.containers.serve import stall
from canvasrt.containers.serve.stall import StallWatch
from tests.helpers.serving import eventually


def test_silence_is_noticed_and_a_server_that_has_not_begun_is_left_alone(tmp_path: Path):
    watch = StallWatch(tmp_path / "heartbeat", lambda: True)
    assert watch.stalled((), limit=0) == ""
    (tmp_path / "heartbeat").touch()
    assert watch.stalled((), limit=0) == ""
    Heartbeat.at(tmp_path / "heartbeat").beat()
    assert watch.stalled((), limit=60) == ""
    assert eventually(lambda: watch.stalled((), limit=0.1) == "made no progress for 0.1 s")


def test_a_stopped_process_is_noticed_and_one_that_goes_on_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stall, "STOPPED_TIMEOUT", 0.3)
    watch = StallWatch(tmp_path / "heartbeat", lambda: True)
    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert watch.stalled([process.pid], 60) == ""
        assert eventually(lambda: "stopped by a signal" in watch.stalled([process.pid], 60))
        os.kill(process.pid, signal.SIGCONT)
        assert eventually(lambda: watch.stalled([process.pid], 60) == "")
        process.kill()


def test_a_triton_that_does_not_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, answers = [0.0], [True]
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = StallWatch(tmp_path / "heartbeat", lambda: answers[0])
    for seconds, does_answer, said in (
        (0.1, True, ""),
        (6.0, True, ""),
        (12.0, True, ""),  # answered the next call
        (16.0, False, ""),
        (18.0, False, "did not answer for 4 s"),
    ):
        now[0], answers[0] = seconds, does_answer
        assert watch.stalled((), 4) == said
