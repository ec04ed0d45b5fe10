"""Load tests of a real HTTP server with a known pace, which the figures must reproduce."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canvasrt.containers.load import calls, load_page
from canvasrt.containers.load.calls import Endpoint, LoadConnection, TimedCall, first_model
from canvasrt.containers.load.measure import (
    LatencySpread,
    Load,
    LoadSummary,
    Round,
    ratios,
    run_sessions,
)
from canvasrt.containers.load.sessions import SETS, built_in, from_file
from canvasrt.errors import CanvasError
from tests.conftest import Command

FIRST, GAP = 0.06, 0.03  # seconds
PIECES, TOKENS, STEPS = 4, 40, 8
SLACK = 0.03  # on a busy machine, some tries take longer, but not all


class _Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]
    active = most = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "paced"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        with kind.lock:
            kind.asked.append(body)
        self._answer(body["messages"][-1]["content"], len(kind.asked))

    def _pace(self, piece: int) -> None:
        """Count the request as active while its client waits. It must not count once the last byte is sent, since the
        client's next request may then arrive."""
        kind = type(self)
        with kind.lock:
            kind.active += 1
            kind.most = max(kind.most, kind.active)
        time.sleep(GAP if piece else FIRST)
        with kind.lock:
            kind.active -= 1

    def _answer(self, text: str, number: int) -> None:
        if "refuse" in text:
            self._send(429, b"{}")
            return
        if "cut" in text:
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for piece in range(PIECES):
            self._pace(piece)
            self._chunk({"choices": [{"delta": {"content": f"p{piece} "}}]})
        if "uncounted" not in text:
            usage = {"prompt_tokens": 1, "completion_tokens": TOKENS, "denoising_steps": STEPS}
            self._chunk({"choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: dict[str, Any]) -> None:
        said = {"id": "x", "object": "chat.completion.chunk", "model": "paced", **data}
        self._write(f"data: {json.dumps(said)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    _Server.asked, _Server.most = [], 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Endpoint(f"http://127.0.0.1:{server.server_port}", "paced", timeout=5.0)
        server.shutdown()


def test_a_call_is_timed(endpoint: Endpoint) -> None:
    wanted = [FIRST, FIRST + (PIECES - 1) * GAP, *[GAP] * (PIECES - 1)]
    for _ in range(50):
        start = time.perf_counter()
        call = LoadConnection(endpoint).call([{"role": "user", "content": "x"}], start)
        assert not call.error
        assert call.text == "p0 p1 p2 p3 "
        assert len(call.gaps) == PIECES - 1
        assert (call.tokens, call.counted, call.steps) == (TOKENS, True, STEPS)
        found = [call.first, call.total, *call.gaps]
        if found == pytest.approx(wanted, abs=SLACK):
            return
    raise AssertionError(found)


def test_a_call_has_to_end_in_time(endpoint: Endpoint) -> None:
    """The whole call takes too long, although every piece arrives in time."""
    short = LoadConnection(replace(endpoint, timeout=FIRST + GAP))
    call = short.call([{"role": "user", "content": "x"}], time.perf_counter())
    assert call.error == "no answer within 0.09 s"


def test_a_connection_that_was_idle_is_opened_anew(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have closed an idle connection."""
    messages: list[Any] = [{"role": "user", "content": "x"}]
    for idle, error in ((60.0, True), (0.0, False)):
        monkeypatch.setattr(calls, "_IDLE", idle)
        connection = LoadConnection(endpoint)
        assert not connection.call(messages, 0.0).error
        assert connection._http is not None
        connection._http.sock.shutdown(socket.SHUT_RDWR)
        assert bool(connection.call(messages, 0.0).error) == error
        connection.close()


def test_concurrency_is_what_was_asked_for(endpoint: Endpoint) -> None:
    sessions = built_in("short", 12)
    one = run_sessions(endpoint, sessions[:4], Load(1))
    assert _Server.most == 1
    four = run_sessions(endpoint, sessions, Load(4))
    assert _Server.most == 4
    each = FIRST + (PIECES - 1) * GAP
    assert one.seconds > 0.95 * 4 * each
    assert four.seconds > 0.95 * 3 * each
    summary = LoadSummary.of([one])
    assert summary.tokens == 4 * TOKENS
    assert summary.tokens_per_second == pytest.approx(4 * TOKENS / one.seconds)
    assert (summary.steps, summary.tokens_per_pass) == (STEPS, TOKENS / STEPS)


def test_arrivals_do_not_wait_for_answers_and_waiting_counts(endpoint: Endpoint) -> None:
    """If only one request may run and more arrive, a call's wait counts as part of its latency."""
    sessions = built_in("short", 8)
    wide = LoadSummary.of([run_sessions(endpoint, sessions, Load(8, rate=40.0))])
    narrow = LoadSummary.of([run_sessions(endpoint, sessions, Load(1, rate=40.0))])
    assert wide.total is not None
    assert narrow.total is not None
    assert narrow.total.p99 > 2 * wide.total.p50
    dues = [call.due for call in run_sessions(endpoint, sessions, Load(8, rate=40.0)).calls]
    again = [call.due for call in run_sessions(endpoint, sessions, Load(8, rate=40.0)).calls]
    offsets = [[due - all[0] for due in all] for all in (dues, again)]
    assert offsets[0] == pytest.approx(offsets[1])  # every run has the same arrival times


@pytest.mark.parametrize(
    ("text", "error"), [("refuse", "HTTP 429"), ("cut", "connection: RemoteDisconnected")]
)
def test_errors_are_counted_by_kind(
    endpoint: Endpoint, tmp_path: Path, text: str, error: str
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"fine\n{text}\nfine\n")
    summary = LoadSummary.of([run_sessions(endpoint, from_file(file, 3), Load(1))])
    assert summary.errors == {error: 1}
    assert summary.tokens == 2 * TOKENS


def test_pieces_stand_for_tokens_that_a_server_does_not_count(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "uncounted"}]}\n')
    summary = LoadSummary.of([run_sessions(endpoint, from_file(file, 2), Load(2))])
    assert (summary.tokens, summary.tokens_counted) == (2 * PIECES, False)
    assert summary.steps is None
    throughput = next(load_page.sections({"a": summary}, {}))
    assert "(pieces)" in throughput["tables"][0][1][0][4]


def test_turns_carry_what_was_answered(endpoint: Endpoint) -> None:
    (session,) = built_in("agent", 1)
    made = run_sessions(endpoint, [session], Load(1))
    assert len(made.calls) == session.calls == len(_Server.asked)
    roles = [message["role"] for message in _Server.asked[-1]["messages"]]
    assert roles == ["system", "user", *["assistant", "user"] * (session.calls - 1)]
    assert _Server.asked[-1]["messages"][2]["content"] == "p0 p1 p2 p3 "
    assert _Server.asked[0]["stream_options"] == {"include_usage": True}


def test_ratios_are_ours_to_theirs() -> None:
    ours = [Round((TimedCall(0.0, 1.0, [0.1], tokens=10),), 0.0, each) for each in (1.0, 2.0)]
    theirs = [Round((TimedCall(0.0, 1.0, [0.4], tokens=30),), 0.0, 1.0)] * 2
    found = ratios(ours, theirs)
    assert found["first"] == pytest.approx([0.25, 0.25, 0.25])
    assert found["tokens_per_second"] == pytest.approx([2 / 9, 1 / 6, 1 / 3])


@pytest.mark.parametrize("name", SETS)
def test_sets_are_the_same_every_time_and_no_two_alike(name: str) -> None:
    sessions = built_in(name, 50)
    assert sessions == built_in(name, 50)
    assert len({str(each) for each in sessions}) == 50


def test_files_that_hold_no_prompts_are_refused(tmp_path: Path) -> None:
    (file := tmp_path / "prompts.jsonl").write_text('{"text": "x"}')
    with pytest.raises(CanvasError, match="cannot read the prompts"):
        from_file(file, 1)
    file.write_text("\n")
    with pytest.raises(CanvasError, match="has no prompts"):
        from_file(file, 1)


def test_percentiles_are_those_of_the_series() -> None:
    spread = LatencySpread.of([each / 1000 for each in range(1, 102)])
    assert spread is not None
    assert (spread.p50, spread.least, spread.most) == pytest.approx((51, 1, 101))
    assert spread.p90 == pytest.approx(91)
    assert LatencySpread.of([]) is None


def test_the_command_prints_and_writes_a_page(
    endpoint: Endpoint, tmp_path: Path, command: Command
) -> None:
    arguments = ("--sessions", 4, "--rounds", 2, "--concurrency", 2, "--report", tmp_path / "out")
    done = command("bench", endpoint.url, "--against", f"{endpoint.url}/v2", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["servers"][endpoint.url]["calls"] == 8
    assert data["settings"]["models"] == ["paced", "paced"]
    assert set(data["ratios"]) == {"first", "gap", "total", "tokens_per_second"}
    for _, low, high in data["ratios"].values():
        assert 0 < low <= high
    calls = 2 * (1 + 2 * 4)  # to both servers: a session to warm up, and the rounds
    assert len(_Server.asked) == calls
    html = (tmp_path / "out" / "bench.html").read_text()
    assert html.count("<svg") == 3
    assert "http" not in html.replace("http://127", "").replace("http://www.w3.org", "")
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == data
    shown = command("bench", endpoint.url, "--sessions", 2, "--rounds", 1)
    assert "tokens per pass" in shown.stdout
    assert "p99" in shown.stdout


def test_a_report_that_cannot_be_written_is_refused_before_the_load(
    endpoint: Endpoint, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "out"
    file.write_text("")
    done = command("bench", endpoint.url, "--sessions", 1, "--rounds", 1, "--report", file)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"error: {file}: File exists"


def test_a_server_that_answers_nothing_is_a_failure(
    endpoint: Endpoint, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("refuse\n")
    done = command("bench", endpoint.url, "--prompts", file, "--sessions", 2, "--rounds", 1)
    assert done.returncode == 1
    assert "429" in done.stdout  # the table lists the errors
    assert "answered none of 2 calls: HTTP 429" in done.stderr


def test_a_server_that_is_not_there_is_one_clear_line(command: Command) -> None:
    done = command("bench", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no OpenAI API answers" in done.stderr


@pytest.mark.parametrize("body", [b'[{"id": "m"}]', b'{"data": null}', b"3"])
def test_a_list_of_models_in_another_form_is_no_bug(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = SimpleNamespace(status=200, read=lambda: body)
    monkeypatch.setattr(LoadConnection, "_ask", lambda *_: reply)
    with pytest.raises(CanvasError, match="no OpenAI API answers"):
        first_model("http://127.0.0.1:9")
