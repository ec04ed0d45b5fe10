"""`canvasrt batch` and the client of the OpenAI API with hostile and broken servers."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from canvasrt.cli.app import run as canvasrt
from canvasrt.containers.batch import servers
from canvasrt.containers.batch.run import ATTEMPTS, Done, run_batch
from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.errors import CanvasError
from tests.helpers.batches import chat, write

GOOD = b'{"id": "chatcmpl-1", "choices": []}'


@pytest.fixture(autouse=True)
def _short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_LONGEST_REST", 0.01)


@contextlib.contextmanager
def answering(
    status: int, body: bytes, more: Callable[[Any], object] | None = None, **headers: str
) -> Iterator[tuple[str, list[str]]]:
    """Run a server with fixed replies; provide its address, and a list of requested paths. `more` writes the rest of a
    reply."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if more is None:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)
                if more is not None:
                    more(self.wfile)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def asked_of(tmp_path: Path, *urls: str, lines: int = 1) -> Done:
    file = write(tmp_path, *(chat(str(number)) for number in range(lines)))
    return run_batch(file, tmp_path / "out.jsonl", 0, "m", servers.Servers(urls, "", 60), 2)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Please log in.</html>",
        b'{"error": {"message": "no"}}',
        b"[]",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"[" * 100_000,
        b"\xff" + GOOD,
    ],
    ids=["a page", "an error", "a list", "NaN", "infinity", "brackets", "bytes"],
)
def test_not_every_200_is_an_answer(tmp_path: Path, body: bytes) -> None:
    with answering(200, body) as (url, _):
        done = asked_of(tmp_path, url)
    assert (done.answers, done.errors) == (0, 1)
    (line,) = done.outputs.errors.read_text().splitlines()
    assert json.loads(line)["error"]["message"].startswith(url)


@pytest.mark.parametrize("wait", ["9" * 400, "\u00b2", "-1", "soon"])
def test_odd_times_to_wait_end_nothing(tmp_path: Path, wait: str) -> None:
    with answering(500, b"{}", Retry_After=wait) as (url, asked):
        assert asked_of(tmp_path, url).errors == 1
    assert len(asked) == ATTEMPTS


@pytest.mark.parametrize("charset", ["hex", "undefined", "idna", "utf-16"])
def test_json_is_utf_8_whatever_a_header_says(tmp_path: Path, charset: str) -> None:
    with answering(200, GOOD, Content_Type=f"application/json; charset={charset}") as (url, _):
        assert asked_of(tmp_path, url).answers == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_reply_without_end_is_cut_off(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "MOST_REPLY", 1 << 20)
    sent = [0]

    def more(to: Any) -> None:
        piece = gzip.compress(b" " * (1 << 24)) if packed else b" " * (1 << 16)
        for _ in range(1 << 12):
            to.write(piece)
            sent[0] += len(piece)

    headers = {"Content_Encoding": "gzip"} if packed else {}
    with answering(200, b"", more, **headers) as (url, asked):
        done = asked_of(tmp_path, url)
        assert len(asked) == ATTEMPTS
    assert (done.answers, done.errors) == (0, 1)
    assert sent[0] < ATTEMPTS << 25


def test_redirects_lead_nowhere(tmp_path: Path) -> None:
    with answering(200, GOOD) as (other, asked):
        for number, to in enumerate((other, "file:///etc/passwd")):
            folder = tmp_path / str(number)
            folder.mkdir()
            with answering(307, b"{}", Location=to) as (url, _):
                assert asked_of(folder, url).errors == 1
    assert not asked


def test_a_broken_server_does_not_attract_all_requests(tmp_path: Path) -> None:
    """A broken server answers sooner than the others, so it always has the fewest open requests."""
    for number, (status, body) in enumerate([(500, b"{}"), (200, b"<html>")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with answering(status, body) as (broken, _), answering(200, GOOD) as (good, _):
            done = asked_of(folder, broken, good, lines=40)
        assert (done.answers, done.errors) == (40, 0)


def test_a_servers_message_does_not_reach_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "\x1b]0;mine\x07\x9b31m\u202e" + "x" * 10_000
    file = write(tmp_path, chat("one"))
    with answering(401, json.dumps({"error": {"message": message}}).encode()) as (url, _):
        assert canvasrt(["batch", str(file), "-o", str(tmp_path / "out.jsonl"), "--url", url]) == 1
    errors = capsys.readouterr().err
    assert "refused the request" in errors
    assert errors.replace("\n", "").isprintable()
    assert len(errors) < 1000


def client_of(url: str, timeout: float = 60) -> OpenAIClient:
    client = OpenAIClient(url, timeout)
    client._model = "m"
    return client


@pytest.mark.parametrize("path", ["", "/v1", "/team", "/team/v1/"])
def test_a_gateway_may_serve_the_api_under_a_path(path: str, tmp_path: Path) -> None:
    with answering(200, b'{"id": "1", "choices": [], "usage": {}}') as (url, asked):
        assert asked_of(tmp_path, url + path).answers == 1
        client_of(url + path).post("decisions", {})
    root = "/team/v1" if "team" in path else "/v1"
    assert asked == [f"{root}/chat/completions", f"{root}/decisions"]


@pytest.mark.parametrize("body", [b"[]", b"null", b'{"choices": [1]}'])
def test_what_is_no_chat_is_named(body: bytes) -> None:
    with answering(200, body) as (url, _), pytest.raises(CanvasError, match="no OpenAI API"):
        client_of(url).ask({"prompt": "x"})
    with (
        answering(200, b"data: " + body + b"\n\n") as (url, _),
        pytest.raises(CanvasError, match="no OpenAI API"),
    ):
        list(client_of(url).events({"prompt": "x"}))


def test_streams_may_have_comments_and_empty_deltas() -> None:
    said = b': ping\n\nevent: x\ndata:{"choices": [{"delta": {"content": "a"}}]}\n\n'
    with answering(200, said + b'data: {"choices": [{"delta": null}]}\n\n') as (url, _):
        assert list(client_of(url).events({"prompt": "x"})) == [("a", None)]


def test_a_stream_has_to_end_in_time() -> None:
    def more(to: Any) -> None:
        for _ in range(20):
            to.write(b": ping\n\n")
            time.sleep(0.05)

    late = pytest.raises(CanvasError, match=r"did not answer within 0\.5 s")
    with answering(200, b"", more) as (url, _), late:
        list(client_of(url, timeout=0.5).events({"prompt": "x"}))


def test_the_seed_that_a_server_drew_is_returned() -> None:
    choice = {"message": {"content": "a"}, "finish_reason": "stop"}
    body = {"choices": [choice], "usage": {}, "canvasrt": {"seed": 5}}
    with answering(200, json.dumps(body).encode()) as (url, _):
        assert client_of(url).ask({"prompt": "x"})["seed"] == 5
