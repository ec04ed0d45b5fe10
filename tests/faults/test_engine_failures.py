"""Engines that fail: whose fault it is, what callers learn, and how the server ends."""

from __future__ import annotations

import http.client
import os
import signal
import time
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from tests.faults.kills import left_behind, processes
from tests.helpers.faulty import Faulty, faulty_package
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, serving
from tests.helpers.watched import Watch, ask, end

pytestmark = needs_triton


@pytest.fixture
def faulty(packaged: Bundle, tmp_path: Path) -> Faulty:
    return faulty_package(packaged, tmp_path / "faulty")


def test_one_failed_pass_is_the_servers_fault_and_ends_nothing(faulty: Faulty, tmp_path: Path):
    with serving(faulty.path, tmp_path, *ANY_PORTS) as running:
        assert ask(running)[0] == 200
        faulty.set("once")
        status, body = ask(running)
        assert status == 500
        assert body["error"]["type"] == "server_error"
        assert ask(running)[0] == 200
        text = metrics(running)
        assert 'canvasrt_openai_requests_total{endpoint="/v1/chat/completions",status="500"} 1' in (
            text
        )
        assert eventually(lambda: "canvasrt_failed_passes_total 1" in metrics(running))


def metrics(running: Serving) -> str:
    host = running.said["openai"].removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", "/v1/metrics")
    return connection.getresponse().read().decode()


def test_a_sticky_gpu_error_ends_the_service(faulty: Faulty, tmp_path: Path):
    with serving(faulty.path, tmp_path, *ANY_PORTS) as running:
        faulty.set("cuda")
        watch = Watch(running)
        status, body = ask(running)
        assert (status, body["error"]["type"]) == (500, "server_error")
        code, errors = end(running)
        assert code == 3
        assert "an illegal memory access was encountered" in errors
        assert all(503 in seen for seen in watch.join().values())


def test_a_non_finite_entropy_ends_the_service(faulty: Faulty, tmp_path: Path):
    with serving(faulty.path, tmp_path, *ANY_PORTS) as running:
        faulty.set("nan")
        assert ask(running)[0] == 500
        code, errors = end(running)
        assert code == 3
        assert "entropy" in errors


def test_repeated_failures_end_the_service(faulty: Faulty, tmp_path: Path):
    with serving(faulty.path, tmp_path, *ANY_PORTS) as running:
        faulty.set("fail")
        statuses = [ask(running)[0] for _ in range(3)]
        assert statuses == [500, 500, 500]
        code, errors = end(running)
        assert code == 3
        assert "3 passes in a row" in errors
        assert "the pass failed on purpose" in errors


def test_a_worker_that_cannot_restart_leaves_nobody_waiting(packaged: Bundle, tmp_path: Path):
    faulty = faulty_package(packaged, tmp_path / "faulty", restart=True)
    with serving(faulty.path, tmp_path, *ANY_PORTS) as running:
        faulty.set("once")
        assert ask(running)[0] == 500
        code, errors = end(running)
        assert code == 3
        assert "no new generator on purpose" in errors


def test_a_pass_that_hangs_is_noticed(faulty: Faulty, tmp_path: Path):
    with serving(faulty.path, tmp_path, *ANY_PORTS, "--stall-timeout", "2") as running:
        assert ask(running)[0] == 200
        time.sleep(3)  # an idle server makes no progress either, and is well
        assert ask(running)[0] == 200
        faulty.set("hang")
        watch = Watch(running)
        begin = time.monotonic()
        assert ask(running)[0] in (500, 503)
        code, errors = end(running)
        assert time.monotonic() - begin < 20
        assert code == 4
        assert "no progress for 2 s" in errors
        assert all(503 in seen for seen in watch.join().values())


@pytest.mark.parametrize("which", ["model", "answer", "triton"])
def test_a_stopped_process_is_noticed(packaged: Bundle, tmp_path: Path, which: str):
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        status, body = ask(running)
        assert status == 200, body
        pid = running.said["pid"] if which == "triton" else model_process(running, which)
        os.kill(pid, signal.SIGSTOP)
        watch = Watch(running)
        begin = time.monotonic()
        code, errors = end(running)
        assert time.monotonic() - begin < 20
        assert code == 4
        assert "stopped by a signal" in errors
        assert all(503 in seen for seen in watch.join().values())


def test_a_stopped_front_end_is_replaced(packaged: Bundle, tmp_path: Path):
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        os.kill(running.said["front_end_pid"], signal.SIGSTOP)
        begin = time.monotonic()
        assert ask(running)[0] == 200
        assert time.monotonic() - begin < 20
        running.stop(signal.SIGTERM)
        assert running.process.returncode == 0
        assert not running.stale()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_cannot_watch_is_replaced(
    packaged: Bundle, tmp_path: Path, number: signal.Signals
):
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        first = processes(running)["guard"]
        os.kill(first, number)
        assert eventually(lambda: processes(running).get("guard", first) != first)
        assert ask(running)[0] == 200
        running.process.kill()
        running.process.wait(10)
        assert not left_behind(running)


def test_a_guard_that_was_stopped_holds_no_end_up(packaged: Bundle, tmp_path: Path):
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        os.kill(processes(running)["guard"], signal.SIGSTOP)
        running.stop(signal.SIGTERM)
        assert running.process.returncode == 0
        assert not left_behind(running)


def model_process(running: Serving, which: str) -> int:
    from tests.helpers.serving_process import command_lines

    model = {"model": "canvasrt_stream", "answer": "canvasrt"}[which]
    wanted = (f"/{model}/1/model.py", f"-{running.process.pid}-")
    lines = command_lines().items()
    (found,) = [int(pid) for pid, line in lines if all(part in line for part in wanted)]
    return found
