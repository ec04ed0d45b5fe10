"""`canvasrt serve` with its front end as users run it: load, signals, crashes, TLS, building first."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
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
from tests.helpers.certificates import make_certificates
from tests.helpers.serving import ENDLESS, eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, command_lines, serving

pytestmark = needs_triton
QUESTION: Any = [{"role": "user", "content": "12+34="}]


def client(running: Serving, key: str = "none", **options: Any) -> OpenAI:
    url = running.said["openai"]
    return OpenAI(**{"base_url": url, "api_key": key, "max_retries": 0, "timeout": 60, **options})


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
                    # This is right for requests that are sent after the signal, which nobody has accepted.
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


@pytest.mark.acceptance
def test_tritons_callers_lose_nothing_either(packaged: Bundle, tmp_path: Path):
    """Callers of Triton itself are served until the end, or learn that it is stopping."""
    from canvasrt.containers.client.triton import Client
    from canvasrt.errors import CanvasError

    outcomes: list[str] = []

    def load(running: Serving) -> None:
        with Client(running.said["grpc"], "grpc", timeout=60) as grpc:
            while True:
                try:
                    outcomes.append(grpc.infer({"prompt": "a", "max_new_tokens": 8}).finish_reason)
                except CanvasError as error:
                    outcomes.append(error.message)
                    return

    with serving(packaged.path, tmp_path, *ANY_PORTS, "--exit-timeout", "300") as running:
        threads = [threading.Thread(target=load, args=(running,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: len(outcomes) > 8)
        running.stop(signal.SIGTERM)  # endless load does not delay it
        for thread in threads:
            thread.join(30)
        assert running.process.returncode == 0
    refusals = [outcome for outcome in outcomes if outcome not in ("length", "stop")]
    assert len(refusals) == 4
    assert all("stopping" in each or "no server answers" in each for each in refusals)


def test_when_triton_dies_everything_ends_and_callers_are_told(packaged: Bundle, tmp_path: Path):
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
        assert eventually(lambda: requests(running) == 1)
        os.kill(running.said["pid"], signal.SIGKILL)
        errors = running.process.communicate(timeout=60)[1]
        thread.join(30)
        assert running.process.returncode == 1
        assert "error: tritonserver stopped with signal SIGKILL" in errors
        assert isinstance(failures[0], (sdk.InternalServerError, sdk.APIConnectionError))
        assert not running.stale()


def requests(running: Serving) -> float:
    with urllib.request.urlopen(running.said["openai"] + "/metrics", timeout=10) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("canvasrt_requests_in_flight "):
                return float(line.split()[-1])
    return -1


def test_keys_and_the_context_reach_the_servers(
    packaged: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CANVASRT_API_KEYS", "sesame")
    monkeypatch.setenv("NIM_MAX_MODEL_LEN", "64")
    monkeypatch.setenv("NIM_SERVED_MODEL_NAME", "diffusion")
    with serving(packaged.path, tmp_path, *ANY_PORTS) as running:
        with client(running, "wrong") as openai, pytest.raises(sdk.AuthenticationError):
            ask(openai)
        with client(running, "sesame") as openai:
            assert openai.models.list().data[0].model_extra == {"max_model_len": 64}
            assert ask(openai, model="diffusion", max_tokens=32)
            with pytest.raises(sdk.BadRequestError) as caught:
                ask(openai, model="diffusion", max_tokens=100)
            assert caught.value.code == "context_length_exceeded"
        for process in (running.said["pid"], running.said["front_end_pid"]):
            assert b"sesame" not in Path(f"/proc/{process}/cmdline").read_bytes()
        assert b"sesame" not in Path(f"/proc/{running.said['pid']}/environ").read_bytes()


def test_a_context_beyond_the_engines_is_refused(packaged: Bundle, tmp_path: Path):
    done = serve(packaged, tmp_path, "--max-model-len", "5000")
    assert done.returncode == 1
    assert "--max-model-len is 5000, but the engines support at most 4096" in done.stderr


def serve(bundle: Bundle, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "canvasrt", "serve", str(bundle.path), *ANY_PORTS, *options]
    env = {**os.environ, "XDG_STATE_HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


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
        # Probes have no certificate: the port for health takes them as they are.
        health = running.said["health"]
        assert urllib.request.urlopen(f"{health}/v1/health/ready", timeout=10).status == 200


def test_graphs_are_built_at_the_first_start_and_the_server_lives_meanwhile(
    graphs: Bundle, tmp_path: Path
):
    """A front end that dies while the engines are built is replaced, too."""
    (tmp_path / "tmp").mkdir()
    # The test takes the lock on the cache first; otherwise the tiny model would be built before anybody could look.
    (profile,) = profiles_of(graphs)
    out = engines_folder(profile, tmp_path / "cache")
    out.parent.mkdir(parents=True)
    lock = os.open(out.parent / f"{out.name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "canvasrt", "serve", str(graphs.path), *ANY_PORTS[2:]]
    command += ["--port", "0", "--health-port", "0", "--cache", str(tmp_path / "cache")]
    process = subprocess.Popen(
        [*command, "--json", "--json-logs"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(json.loads(line))
            message = lines[-1]["message"]
            if message.startswith("alive: "):
                health = message.split()[-1]
                assert eventually(lambda: phase(health) == "building")  # noqa: B023
                (front,) = (
                    pid
                    for pid in children(process.pid)[0]
                    if "canvasrt.containers.openai" in command_lines()[str(pid)]
                )
                os.kill(front, signal.SIGKILL)
                assert eventually(lambda: not is_running(front))  # noqa: B023
                assert eventually(lambda: phase(health) == "building")  # noqa: B023
                os.close(lock)
            if "Started HTTPService" in message:
                break
        messages = [line["message"] for line in lines]
        assert any(each.startswith("building the engines of onnxruntime-fp32") for each in messages)
        assert any(each.startswith("built: ") for each in messages)
        assert {line["source"] for line in lines} >= {
            "tritonserver",
            "canvasrt.containers.serve.prepare",
        }
        assert eventually(lambda: phase(health) == "serving")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def phase(health: str) -> str:
    host = health.removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=10)
    try:
        connection.request("GET", "/v1/health/live")
        return str(json.loads(connection.getresponse().read())["phase"])
    except (OSError, http.client.HTTPException):
        return ""  # of a front end that has just died
    finally:
        connection.close()


@pytest.mark.acceptance
def test_a_corrupt_engine_is_named_in_a_container_too(packaged: Bundle, tmp_path: Path):
    """With the log on stderr, as containers have it, the last lines still say why."""
    import shutil

    damaged = tmp_path / "package"
    shutil.copytree(packaged.path, damaged)
    body = damaged / "engines" / "body_0.bin"
    body.write_bytes(bytes(64) + body.read_bytes()[64:])
    done = serve(Bundle(damaged, packaged.manifest), tmp_path, "--log", "-")
    assert done.returncode == 1
    *_, error, hint = done.stderr.splitlines()
    assert error.startswith("error: tritonserver stopped with exit code 1")
    assert "body_0.bin" in error
    assert hint.startswith("hint: ")
