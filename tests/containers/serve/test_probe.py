"""The health check of a container: what it asks, and when it ends a dead server."""

from __future__ import annotations

import http.server
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from canvasrt.containers.serve import probe


class _Answers(http.server.BaseHTTPRequestHandler):
    statuses: dict[str, int]

    def do_GET(self) -> None:
        self.send_response(self.statuses[self.path.rpartition("/")[2]])
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a server that answers health checks."""
    _Answers.statuses = {"ready": 200, "live": 200}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"NIM_SERVER_PORT": str(server.server_port), "CANVASRT_END_UNHEALTHY": "1"}
        server.shutdown()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that the check sent."""
    sent: list[int] = []
    monkeypatch.setattr(probe, "_servers", lambda processes: [1])
    monkeypatch.setattr(probe.os, "kill", lambda process, number: sent.append(number))
    return sent


def test_a_server_that_is_ready_is_healthy(environment: dict[str, str]) -> None:
    assert probe.main(environment) == 0
    assert probe.main({"NIM_HTTP_API_PORT": environment["NIM_SERVER_PORT"]}) == 0
    _Answers.statuses["ready"] = 503
    assert probe.main(environment) == 1
    assert probe.main({**environment, "NIM_SERVER_PORT": "1"}) == 1


def test_a_certificate_that_is_for_servers_only_has_a_way_out(
    certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With mutual TLS, the check presents the server's certificate. If that is not valid for clients, the error names
    NIM_HEALTH_PORT."""
    files = {
        "NIM_SSL_CERTS_PATH": str(certificates / "server.pem"),
        "NIM_SSL_KEY_PATH": str(certificates / "server.key"),
    }
    assert probe.main({"NIM_SERVER_PORT": "1", "NIM_SSL_MODE": "mtls", **files}) == 1
    assert "NIM_HEALTH_PORT" in capsys.readouterr().err


def test_a_dead_server_is_ended_after_a_few_checks(
    environment: dict[str, str], killed: list[int]
) -> None:
    assert probe.main(environment) == 0
    _Answers.statuses.update(ready=503, live=503)
    sent = []
    for _ in range(probe.KILL_AFTER):
        assert probe.main(environment) == 1
        sent.append(list(killed))
    stop, kill = probe.STOP_AFTER, probe.KILL_AFTER
    assert [len(each) for each in sent[: stop - 1]] == [0] * (stop - 1)
    assert killed == [signal.SIGTERM] * (kill - stop) + [signal.SIGKILL]
    probe.main(environment)  # a new server, which has not yet answered a check
    assert len(killed) == kill - stop + 1


def test_one_that_answers_again_is_counted_from_nothing(
    environment: dict[str, str], killed: list[int]
) -> None:
    for _ in range(3):
        _Answers.statuses.update(ready=200, live=200)
        assert probe.main(environment) == 0
        _Answers.statuses.update(ready=503, live=503)
        for _ in range(probe.STOP_AFTER - 1):
            probe.main(environment)
    assert not killed


@pytest.mark.parametrize("state", ["starting", "loading or stopping", "slow", "not asked to"])
def test_others_are_left_alone(
    environment: dict[str, str], killed: list[int], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if state == "not asked to":
        environment = {**environment, "CANVASRT_END_UNHEALTHY": "0"}
    if state != "starting":
        assert probe.main(environment) == 0
    alive = state in ("loading or stopping", "slow")
    _Answers.statuses.update(ready=503, live=200 if alive else 503)
    if state == "slow":  # too slow to say whether it is ready
        ask = probe._ask
        slow = lambda variables, path: None if "ready" in path else ask(variables, path)  # noqa: E731
        monkeypatch.setattr(probe, "_ask", slow)
    for _ in range(2 * probe.KILL_AFTER):
        assert probe.main(environment) == 1
    assert not killed


def test_it_finds_the_first_process_or_its_child_alone(tmp_path: Path) -> None:
    serve = "python3\0-m\0canvasrt\0serve\0"
    processes = {
        1: ("docker-init\0--\0", "(docker-init) S 0"),
        7: (serve, "(py) (thon) S 1"),
        8: (serve, "(python) S 7"),
        9: ("tritonserver\0", "(tritonserver) S 1"),
    }
    for number, (command, state) in processes.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "cmdline").write_text(command)
        (folder / "stat").write_text(f"{number} {state} 1 1")
    (tmp_path / "self").mkdir()
    assert probe._servers(tmp_path) == [7]
    (tmp_path / "1" / "cmdline").write_text(serve)
    assert sorted(probe._servers(tmp_path)) == [1, 7]
