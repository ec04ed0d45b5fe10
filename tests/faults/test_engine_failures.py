"""Failing engines: who is blamed, which errors callers get, and how the server ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from tests.faults.attack import left_behind, processes
from tests.helpers.faulty import DIGITS, Faulty, Watch, faulty_package
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, ask, call, serving

pytestmark = needs_triton


@pytest.fixture
def faulty(packaged: Bundle, tmp_path: Path) -> Faulty:
    return faulty_package(packaged, tmp_path / "faulty")


def metrics(running: Serving) -> str:
    return call(running.host, "/v1/metrics")[1].decode()


def test_one_failed_pass_ends_nothing_and_a_lost_gpu_everything(faulty: Faulty, tmp_path: Path):
    with serving(faulty.path, tmp_path, *ANY_PORTS) as running:
        assert ask(running)[0] == 200
        faulty.set("once")
        status, body, _ = ask(running)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert ask(running)[0] == 200
        text = metrics(running)
        assert 'requests_total{endpoint="/v1/chat/completions",status="500"} 1' in text
        assert eventually(lambda: "canvasrt_failed_passes_total 1" in metrics(running))
        faulty.set("cuda")
        watch = Watch(running)
        status, body, _ = ask(running)
        assert (status, body["error"]["type"]) == (500, "server_error")
        watch.ends(3, "an illegal memory access was encountered")


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("fault", "times", "says"),
    [
        ("nan", 1, ["entropies that the engines returned are not finite"]),
        ("fail", 3, ["3 passes in a row", "the pass failed on purpose"]),
        ("once", 1, ["no new generator on purpose"]),
    ],
)
def test_engines_that_cannot_go_on_end_the_service(
    packaged: Bundle, tmp_path: Path, fault: str, times: int, says: list[str]
):
    faulty = faulty_package(packaged, tmp_path / "faulty", restart=fault == "once")
    with serving(faulty.path, tmp_path, *ANY_PORTS) as running:
        faulty.set(fault)
        watch = Watch(running)
        assert [ask(running)[0] for _ in range(times)] == [500] * times
        watch.ends(3, *says)


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("fault", "options"),
    [("hang", {}), ("read", {}), ("read", DIGITS)],
    ids=["a pass", "Triton's thread", "a preparing thread"],
)
def test_what_hangs_is_noticed(faulty: Faulty, tmp_path: Path, fault: str, options: dict[str, Any]):
    with serving(faulty.path, tmp_path, *ANY_PORTS, "--stall-timeout", "3") as running:
        assert ask(running, **options)[0] == 200
        time.sleep(4)  # an idle server must not count as hanging
        assert ask(running, **options)[0] == 200
        faulty.set(fault)
        watch = Watch(running)
        assert ask(running, **options)[0] in (500, 503)
        watch.ends(4, "no progress for 3 s")


@pytest.mark.acceptance
@pytest.mark.parametrize("which", ["stream model", "answer model", "triton"])
def test_a_stopped_process_is_noticed(packaged: Bundle, tmp_path: Path, which: str):
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        assert ask(running)[0] == 200
        os.kill(processes(running)[which], signal.SIGSTOP)
        Watch(running).ends(4, "stopped by a signal")


@pytest.mark.acceptance
def test_helpers_that_end_or_stop_are_replaced(packaged: Bundle, tmp_path: Path):
    """These helpers are the front end and the guard, which cleans up after a killed service."""
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        os.kill(running.said["front_end_pid"], signal.SIGSTOP)
        assert ask(running)[0] == 200
        for number in (signal.SIGKILL, signal.SIGSTOP):
            guard = processes(running)["guard"]
            os.kill(guard, number)
            assert eventually(lambda: processes(running).get("guard", guard) != guard)  # noqa: B023
        assert ask(running)[0] == 200
        running.process.kill()
        running.process.wait(60)
        assert not left_behind(running)


@pytest.mark.acceptance
def test_a_guard_that_was_stopped_holds_no_end_up(packaged: Bundle, tmp_path: Path):
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        os.kill(processes(running)["guard"], signal.SIGSTOP)
        running.stop(signal.SIGTERM)
        assert running.process.returncode == 0
        assert not left_behind(running)
