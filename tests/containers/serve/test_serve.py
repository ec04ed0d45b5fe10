"""`canvasrt serve` as a process: what it prints, how it stops, and that it leaves no processes or files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.client.triton import Client, TritonAnswer
from canvasrt.containers.serve.server import Server
from canvasrt.errors import CanvasError
from tests.helpers.serving import ENDLESS, eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, call, command_lines, serving, started

pytestmark = needs_triton


def test_a_server_s_life(engines: Bundle, tmp_path: Path):
    """Engines are served without a package. Options reach the models, and a host may be a name. Under nohup, a closed
    terminal does not stop the server. A signal stops everything, even if a client keeps its connection open."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # like nohup; children inherit it
    options = ["--host", "localhost", "--threads", "3", "--verbose", "--exit-timeout", "60"]
    options += ["--cache", str(tmp_path / "c")]
    try:
        with (
            serving(engines.path, tmp_path, *ANY_PORTS, *options) as running,
            running.client() as client,
        ):
            environment = Path(f"/proc/{running.model_process()}/environ").read_bytes().split(b"\0")
            assert b"CANVASRT_THREADS=3" in environment
            assert f"CANVASRT_CACHE={tmp_path / 'c'}".encode() in environment
            with urllib.request.urlopen(running.said["metrics"], timeout=10) as page:
                assert b"canvasrt_requests_in_flight" in page.read()
            running.process.send_signal(signal.SIGHUP)
            assert client.infer({"prompt": "12+34=", "max_new_tokens": 3}).token_ids
            assert running.stale()  # the check below finds them
            shown = running.stop(signal.SIGINT)
            assert "Started HTTPService" in shown
            assert running.process.returncode == 0
            assert not running.stale()
            assert not running.scratch()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_the_start_stops_everything(packaged: Bundle, tmp_path: Path):
    command = [sys.executable, "-m", "canvasrt", "serve", str(packaged.path), *ANY_PORTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    running = Serving(process, {}, tmp_path)
    assert eventually(lambda: bool(running.stale()))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0
    assert not running.stale()


def test_serving_leaves_the_package_as_it_was(packaged: Bundle, server: object):
    assert not packaged.unlisted()


def test_a_killed_parent_takes_the_server_along(packaged: Bundle, tmp_path: Path):
    with (
        serving(packaged.path, tmp_path, *ANY_PORTS) as running,
        Client(running.said["grpc"], "grpc", timeout=60) as client,
    ):
        asked = client.stream({"prompt": "x", "drafts": True, **ENDLESS})
        assert next(asked)
        running.stop(signal.SIGKILL)
        assert eventually(lambda: not running.stale() and not running.scratch())


@pytest.mark.acceptance
def test_requests_in_flight_may_finish(packaged: Bundle, tmp_path: Path):
    """Direct callers of Triton get their answers, or an error that the server is stopping. Neither endless load nor an
    idle open stream delays the end."""
    with serving(packaged.path, tmp_path, *ANY_PORTS, "--exit-timeout", "300") as running:
        begun = threading.Event()

        def finish() -> TritonAnswer:
            options = {**ENDLESS, "max_denoising_steps": 60, "max_new_tokens": 4}
            with Client(running.said["grpc"], "grpc", timeout=60) as client:
                for event in client.stream({"prompt": "x", "drafts": True, **options}):
                    begun.set()
                    last = event
            return last

        def load() -> str:
            with Client(running.said["grpc"], "grpc", timeout=60) as client:
                with pytest.raises(CanvasError) as refused:
                    while True:
                        client.infer({"prompt": "a", "max_new_tokens": 8})
            return refused.value.message

        with ThreadPoolExecutor(5) as pool:
            refusals = [pool.submit(load) for _ in range(4)]
            answer = pool.submit(finish)
            assert begun.wait(30)
            with Client(running.said["grpc"], "grpc", keep_stream=True) as idle:
                assert [*idle.stream({"prompt": "x", "max_new_tokens": 4})]
                running.stop(signal.SIGTERM)
            assert (answer.result().finish_reason, answer.result().steps) == ("length", [60])
            for each in refusals:
                assert "stopping" in each.result() or "no server answers" in each.result()
        assert running.process.returncode == 0


@pytest.mark.parametrize(
    ("who", "number", "times"),
    [
        ("tritonserver", signal.SIGABRT, 1),
        pytest.param("_stub", signal.SIGKILL, 1, marks=pytest.mark.acceptance),
        pytest.param("_stub", signal.SIGKILL, 2, marks=pytest.mark.acceptance),
    ],
)
def test_a_crash_while_loading_is_repaired_once(
    packaged: Bundle, tmp_path: Path, who: str, number: int, times: int
):
    """While models load, a lock of Triton's Python backend sometimes fails. If a model's process has died, Triton alone
    would wait ten minutes."""
    process = started(packaged.path, tmp_path, *ANY_PORTS)
    pattern = rf"{who} .*canvasrt\S*-{process.pid}-"
    for _ in range(times):
        killed: set[str] = set()
        while not killed and process.poll() is None:  # before it imports modules
            lines = command_lines().items()
            killed = {
                pid for pid, line in lines if re.search(pattern, line) and "sh -c" not in line
            }
        for pid in killed:
            os.kill(int(pid), number)
        assert eventually(lambda killed=killed: not killed & command_lines().keys())
    assert process.stdout is not None
    if times == 1:
        assert process.stdout.readline()  # the server is ready
        process.terminate()
    errors = process.communicate(timeout=60)[1]
    assert "starting it again" in errors
    assert process.returncode == (0 if times == 1 else 1), errors
    assert not Serving(process, {}, tmp_path).stale()


@pytest.mark.acceptance
def test_a_second_signal_stops_at_once(packaged: Bundle, tmp_path: Path):
    with (
        serving(packaged.path, tmp_path, *ANY_PORTS, "--exit-timeout", "60") as running,
        Client(running.said["grpc"], "grpc", timeout=60) as client,
    ):
        asked = client.stream({"prompt": "x", "drafts": True, **ENDLESS})
        assert next(asked)
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(1)
        shown = running.stop(signal.SIGINT)
        assert "error: stopped at once by a second signal" in shown
        assert running.process.returncode == 1
        assert not running.stale()


@pytest.mark.parametrize("log", ["log", pytest.param("-", marks=pytest.mark.acceptance)])
def test_damaged_engines_fail_with_the_cause(packaged: Bundle, tmp_path: Path, log: str):
    """The cause is reported even if the log goes to stderr, as in containers."""
    damaged = tmp_path / "package"
    shutil.copytree(packaged.path, damaged)
    body = damaged / "engines" / "body_0.bin"
    body.write_bytes(bytes(64) + body.read_bytes()[64:])
    file = log if log == "-" else str(tmp_path / log)
    process = started(damaged, tmp_path, *ANY_PORTS, "--log", file)
    *_, error, hint = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == 1
    assert error.startswith("error: tritonserver stopped with exit code 1")
    assert "body_0.bin" in error
    assert hint.startswith("hint: ")
    assert ("the log is" in hint) == (log == "log")


def test_callers_cannot_change_the_server(server: Server):
    for path, body in (
        ("logging", {"log_verbose_level": 1}),
        ("trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        ("systemsharedmemory/region/a/register", {"key": "/a", "offset": 0, "byte_size": 8}),
        ("repository/models/canvasrt/unload", {}),
    ):
        assert call(f"127.0.0.1:{server.ports.http}", f"/v2/{path}", body).status == 403


def test_callers_cannot_change_the_server_over_grpc(server: Server):
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    with InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        assert client.is_server_ready()
        for call in (
            lambda: client.update_log_settings({"log_verbose_level": 1}),
            lambda: client.register_system_shared_memory("a", "/a", 8),
            lambda: client.unload_model("canvasrt"),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
