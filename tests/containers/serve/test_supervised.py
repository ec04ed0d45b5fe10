"""`canvasrt serve` with its front end, as users run it: load, signals, crashes, TLS, and building at the start."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import ssl
import threading
import urllib.request
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from canvasrt.bundle import Bundle
from canvasrt.containers.processes import children, is_running
from canvasrt.containers.serve.prepare import engines_folder
from canvasrt.containers.serve.serving_profiles import profiles_of
from tests.helpers.serving import ENDLESS, eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, call, command_lines, serving, started

pytestmark = needs_triton
QUESTION: Any = [{"role": "user", "content": "12+34="}]


def client(running: Serving, **options: Any) -> OpenAI:
    url = running.said["openai"]
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, **options)


def ask(openai: OpenAI, **options: Any) -> Any:
    return openai.chat.completions.create(
        **{"model": "canvasrt", "messages": QUESTION, "max_tokens": 3, **options}
    )


def test_no_request_is_lost_when_it_is_stopped_under_load(packaged: Bundle, tmp_path: Path):
    """Every request is answered completely or refused; none is cut off."""
    outcomes: list[str] = []
    stopping = threading.Event()

    def load(running: Serving, number: int) -> None:
        with client(running) as openai:
            while True:
                before = stopping.is_set()
                try:
                    outcomes.append(one(openai, stream=number % 2 == 1))
                except sdk.APIStatusError as error:
                    outcomes.append(f"turned away with {error.status_code}")
                except sdk.APIConnectionError as error:
                    # Only requests sent after the signal may be refused: the server has not accepted them.
                    outcomes.append("refused" if before else f"lost: {error.__cause__!r}")
                    return

    def one(openai: OpenAI, stream: bool) -> str:
        slow = {"max_denoising_steps": 30, "stability_threshold": 10_000}
        if not stream:
            return str(ask(openai, max_tokens=40, extra_body=slow).choices[0].finish_reason)
        *_, last = ask(openai, max_tokens=40, extra_body=slow, stream=True)
        return str(last.choices[0].finish_reason)

    with serving(packaged.path, tmp_path, *ANY_PORTS, "--exit-timeout", "300") as running:
        threads = [threading.Thread(target=load, args=(running, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: len(outcomes) > 12)
        stopping.set()
        running.stop(signal.SIGTERM)
        for thread in threads:
            thread.join(30)
        assert running.process.returncode == 0
        assert not running.stale()
        assert not running.scratch()
    counted = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
    answered = counted.pop("length", 0) + counted.pop("stop", 0)
    assert answered > 12
    assert counted.pop("refused") == 6
    counted.pop("turned away with 503", None)
    assert not counted


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ("triton", "error: tritonserver stopped with signal SIGKILL"),
        # Triton alone would stay ready and fail every request.
        ("model", "error: a model's process has ended"),
    ],
)
def test_when_triton_dies_everything_ends_and_callers_are_told(
    packaged: Bundle, tmp_path: Path, who: str, says: str
):
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                with client(running) as openai:
                    ask(openai, max_tokens=4000, extra_body=ENDLESS)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert eventually(
            lambda: b"\ncanvasrt_requests_in_flight 1" in call(running.host, "/v1/metrics").body
        )
        os.kill(running.said["pid"] if who == "triton" else running.model_process(), signal.SIGKILL)
        errors = running.process.communicate(timeout=60)[1]
        thread.join(30)
        assert running.process.returncode == 1
        assert says in errors
        assert isinstance(failures[0], (sdk.InternalServerError, sdk.APIConnectionError))
        assert not running.stale()


def test_mutual_tls(packaged: Bundle, tmp_path: Path, certificates: Path):
    import httpx2

    options = ["--ssl-mode", "mtls", "--ssl-cert", str(certificates / "server.pem")]
    options += ["--ssl-key", str(certificates / "server.key")]
    options += ["--ssl-ca", str(certificates / "ca.pem"), "--health-port", "0"]
    with serving(packaged.path, tmp_path, *ANY_PORTS, *options) as running:
        assert running.said["openai"].startswith("https://")
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        with client(running, http_client=httpx2.Client(verify=context)) as openai:
            with pytest.raises(sdk.APIConnectionError):
                ask(openai)
        context.load_cert_chain(certificates / "caller.pem", certificates / "caller.key")
        with client(running, http_client=httpx2.Client(verify=context)) as openai:
            assert ask(openai)
        # Probes have no certificate, and the health port does not require one.
        health = running.said["health"]
        assert urllib.request.urlopen(f"{health}/v1/health/ready", timeout=10).status == 200


def test_graphs_are_built_at_the_first_start_and_the_server_lives_meanwhile(
    graphs: Bundle, tmp_path: Path
):
    """A front end that dies during the build is replaced."""
    # The test first locks the cache, so that the build of the tiny model waits until the test has seen it.
    (profile,) = profiles_of(graphs)
    out = engines_folder(profile, tmp_path / "cache")
    out.parent.mkdir(parents=True)
    lock = os.open(out.parent / f"{out.name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    options = ("--health-port", "0", "--cache", str(tmp_path / "cache"), "--json-logs")
    process = started(graphs.path, tmp_path, *ANY_PORTS, *options)
    try:
        assert process.stderr is not None
        lines: list[dict[str, str]] = []
        while not lines or not lines[-1]["message"].startswith("alive: "):
            lines.append(json.loads(process.stderr.readline()))
        host = lines[-1]["message"].partition("http://")[2].partition("/")[0]

        def phase() -> str:
            try:
                return str(call(host, "/v1/health/live").body["phase"])
            except (OSError, http.client.HTTPException):
                return ""  # the front end has just died

        assert eventually(lambda: phase() == "building")
        (front,) = (
            pid
            for pid in children(process.pid)[0]
            if "canvasrt.containers.openai" in command_lines()[str(pid)]
        )
        os.kill(front, signal.SIGKILL)
        assert eventually(lambda: not is_running(front))
        assert eventually(lambda: phase() == "building")
        os.close(lock)
        while "Started HTTPService" not in lines[-1]["message"]:
            lines.append(json.loads(process.stderr.readline()))
        for begin in ("building the engines of onnxruntime-fp32", "built: "):
            assert any(line["message"].startswith(begin) for line in lines)
        sources = {line["source"] for line in lines}
        assert sources >= {"tritonserver", "canvasrt.containers.serve.prepare"}
        assert eventually(lambda: phase() == "serving")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
