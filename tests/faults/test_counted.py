"""Values, prompts, grammars, images and lines that one caller sends are counted before they are processed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers import processes, untrusted
from canvasrt.containers.logs import Patient
from canvasrt.containers.openai import body_pool, remote
from canvasrt.containers.openai.body import read_body
from canvasrt.containers.openai.chat import CompletionRequest, chat_generation
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.generation import answer_inputs
from canvasrt.containers.openai.messages import read_messages
from canvasrt.containers.openai.ollama import OllamaChat, OllamaPrompt, generate
from canvasrt.containers.openai.remote import Fetcher, ImageBudget, inline
from canvasrt.containers.openai.tools import ChatRequest
from canvasrt.containers.openai.upstream import triton_error
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.triton import grammar
from canvasrt.containers.untrusted import MAX_DEPTH, MAX_VALUES, check_json
from canvasrt.errors import CanvasError
from canvasrt.runtime.chat_template import ChatTemplate, ControlTexts
from canvasrt.runtime.model import Model
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.alone import Alone, connect

MANY: list[Any] = [[]] * MAX_VALUES
CHAT = [{"role": "user", "content": "a"}]


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"prompt": MANY}),
        (OllamaPrompt, {"prompt": MANY}),
        (ChatRequest, {"messages": CHAT, "tools": [tool({"a": MANY})]}),
        (OllamaChat, {"messages": CHAT, "tools": MANY}),
    ],
    ids=["prompts", "Ollama's prompt", "parameters", "Ollama's tools"],
)
def test_values_are_counted_before_they_are_read(
    kind: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    read: list[Any] = []
    monkeypatch.setattr(kind, "model_validate_json", read.append)
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values"):
        read_body(kind, json.dumps({"model": "m", **fields}).encode())
    assert not read


def test_only_so_many_prompts_are_read():
    body = {"model": "m", "prompt": [[]] * 129}
    with pytest.raises(ApiError, match="129 prompts; at most 128"):
        read_body(CompletionRequest, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, False),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), True),
        ('{"a":' * (MAX_DEPTH + 1) + "0" + "}" * (MAX_DEPTH + 1), True),
        ("[" * 1_000_000, True),
        ("[" + "[]," * 1000 + "[]]", False),
        (json.dumps(['[{,\\"' * MAX_VALUES]), False),  # brackets in text do not count
        (json.dumps([0] * (MAX_VALUES - 2)), False),
        (json.dumps([0] * MAX_VALUES), True),
        ("[" * 101 + '"' + '\\"' * 100_000, True),  # a string without an end
        ("[" * 101 + '"' + '\\"' * 100_000 + "\\", True),
        ("[" * 101 + "]" * 15_000_000, True),
    ],
    ids=range(11),
)
def test_counting(text: str, refused: bool):
    raw, began = text.encode(), time.thread_time()
    if refused:
        with pytest.raises(ValueError, match=r"it (has|is nested)"):
            check_json(raw)
    else:
        check_json(raw)
    assert time.thread_time() - began < 1


def test_values_are_counted_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    """The count is right wherever a piece of the text ends: inside strings, escapes, and runs of backslashes."""
    text = json.dumps(['a"[\\\\' * 3, {"\\": ["]", '\\"[[[[', [[1, 2]]]}, "\\\\", []])
    for piece in range(1, 40):
        monkeypatch.setattr(untrusted, "_PIECE", piece)
        assert check_json(text.encode(), 13) == 13
        with pytest.raises(ValueError, match="more than 12 values"):
            check_json(text.encode(), 12)
        monkeypatch.setattr(untrusted, "MAX_DEPTH", 5)
        check_json(text.encode(), 13)
        monkeypatch.setattr(untrusted, "MAX_DEPTH", 4)
        with pytest.raises(ValueError, match="nested more than 4 deep"):
            check_json(text.encode(), 13)
        monkeypatch.setattr(untrusted, "MAX_DEPTH", 100)


def test_long_bodies_rest_while_others_wait(monkeypatch: pytest.MonkeyPatch):
    rests: list[float] = []
    monkeypatch.setattr(body_pool.time, "sleep", rests.append)

    def work() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    async def run(at_once: int) -> float:
        pool = body_pool.BodyPool()
        rests.clear()
        for _ in range(0, 4, at_once):
            await asyncio.gather(*(pool.run(2**21, work) for _ in range(at_once)))
        pool.close()
        return sum(rests)

    assert asyncio.run(run(1)) == 0
    assert asyncio.run(run(4)) > 2 * body_pool.REST * 0.015


def test_arguments_of_calls_are_counted_together():
    text = json.dumps({"a": [0] * (MAX_VALUES // 2)})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    assert read_messages([{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(ApiError, match=f"may have {MAX_VALUES} values together"):
        read_messages([{"role": "assistant", "tool_calls": [call]}] * 2)


def test_large_grammars_are_not_sent_on():
    enum = {"enum": [f"{n:08}" for n in range(50_000)]}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": enum}}
    body = json.dumps({"model": "m", "messages": CHAT, "response_format": format})
    with pytest.raises(ApiError, match="characters of JSON; at most") as error:
        answer_inputs(chat_generation(read_body(ChatRequest, body.encode())))
    assert error.value.param == "response_format.json_schema.schema"


def test_large_grammars_are_not_parsed(monkeypatch: pytest.MonkeyPatch):
    """The limit also holds for callers of Triton."""
    monkeypatch.setattr(grammar, "read_object", lambda *_: pytest.fail("it was parsed"))
    nothing: Any = object()
    with pytest.raises(CanvasError, match="grammar has 400001 characters"):
        grammar.read_grammar(" " * 400_001, nothing, nothing)


@pytest.mark.acceptance
def test_sizes_of_grammars_are_checked_before_their_trial(
    model: Model, engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    tried: list[Any] = []
    monkeypatch.setattr(grammar.GrammarSandbox, "check", lambda *given: tried.append(given))
    enum = {"type": "json_schema", "schema": {"enum": [f"{n:08}" for n in range(10_000)]}}
    for spec in (enum, {"type": "regex", "regex": "a" * 10_000}):
        with pytest.raises(CanvasError, match="give at most"):
            try:
                grammar.read_grammar(json.dumps(spec), model, Tokenizer.load(engines))
            except CanvasError as error:
                raise CanvasError(f"{error.message} {error.hint}") from None
    assert not tried


@pytest.fixture
def images() -> Iterator[tuple[str, list[int]]]:
    """A site with endless images, and a list of how many bytes of each were read."""
    sent: list[int] = []

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            sent.append(0)
            own = len(sent) - 1
            try:
                while True:
                    self.wfile.write(b"." * 65_536)
                    sent[own] += 65_536
            except OSError:
                return

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://public.test:{server.server_address[1]}/", sent
        server.shutdown()


def test_images_are_budgeted_while_they_are_fetched(
    images: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Every request has a budget, and there is a budget for all requests together. The bytes of a request are returned
    when it ends."""
    url, _ = images
    taken: list[int] = []
    take = ImageBudget.take

    def counted(self: ImageBudget, size: int) -> None:
        taken.append(size if self._parent is None else 0)
        take(self, size)

    monkeypatch.setattr(ImageBudget, "take", counted)
    monkeypatch.setattr(remote, "MAX_REQUEST_BYTES", 2**20)
    monkeypatch.setattr(remote, "MAX_HELD_BYTES", 3 * 2**20)
    fetcher = Fetcher(lambda *_: ["127.0.0.1"], lambda _: True)
    part = {"type": "image_url", "image_url": {"url": url}}

    async def ask(budget: ImageBudget, count: int = 4) -> None:
        chat = [{"role": "user", "content": [json.loads(json.dumps(part)) for _ in range(count)]}]
        await inline(chat, fetcher, budget)

    with fetcher.request() as budget:
        with pytest.raises(ApiError, match="the request's images are larger than 1 MiB"):
            asyncio.run(ask(budget))
    assert sum(taken) < 8 * 2**20
    assert fetcher._held.taken <= 4 * 65_536 * 2  # other threads may still read
    monkeypatch.setattr(remote, "MAX_REQUEST_BYTES", 8 * 2**20)
    fetcher = Fetcher(lambda *_: ["127.0.0.1"], lambda _: True)
    with (
        fetcher.request() as budget,
        pytest.raises(ApiError, match="of all requests are larger than 3"),
    ):
        asyncio.run(ask(budget, 1))
    assert fetcher._held.taken == 0


def test_a_log_that_nobody_reads_holds_up_nobody():
    """Lines that do not fit are dropped and counted. The count is logged when the log is read again."""
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        handler = Patient(logging.StreamHandler(stream), most=100)
        for number in range(5000):
            handler.handle(logging.makeLogRecord({"msg": f"{number} " + "." * 100}))
        assert handler.dropped > 0
        lines = os.fdopen(reader, encoding="utf-8")
        read: list[str] = []
        thread = threading.Thread(target=lambda: read.extend(lines), daemon=True)
        thread.start()
        handler.records.join()
        handler.close()
    thread.join(60)
    told = sum(int(line.split()[0]) for line in read if "were dropped" in line)
    kept = sum("..." in line for line in read)
    assert (told, kept) == (handler.dropped, 5000 - handler.dropped)


@pytest.mark.parametrize(
    "template",
    [
        "{% for name, of in x.items() %}{{ name }}{% endfor %}",
        "{% macro down(v) %}{{ down(v) }}{% endmacro %}{{ down(x) }}",
        "{{ x[0].upper() }}",
    ],
)
def test_values_that_a_template_cannot_take_are_the_callers_mistake(template: str):
    rendered = ChatTemplate(template, {}, ControlTexts([]))
    with pytest.raises(CanvasError, match="the chat template refused"):
        rendered.render({"x": [1]})


def test_spellings_of_control_tokens_are_counted_while_they_are_found():
    control = ControlTexts(["<unk>"])
    begin = time.thread_time()
    with pytest.raises(CanvasError, match="more than 65536 times"):
        control.pieces("<unk>" * 3_000_000)
    assert time.thread_time() - begin < 1
    assert len(control.pieces("<unk>" * 65_535)) == 65_536


def test_many_control_tokens_are_not_tried_one_by_one():
    """Gemma's tokenizers have thousands of control tokens. The search still finds the longest spelling at the leftmost
    position."""
    texts = [f"<unused{number}>" for number in range(6000)] + ["<unk>", "<u", "<un", "x"]
    control = ControlTexts(texts)
    begin = time.thread_time()
    assert len(control.pieces("<" * 300_000)) == 1
    assert time.thread_time() - begin < 1
    plain = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    parts = [*"<>nux15", "unused", "<unused12", "<unk"]
    draw = random.Random(0)
    for _ in range(1000):
        text = "".join(draw.choices(parts, k=12))
        marked = control.mark(text)
        assert control.unmark(marked) == text
        own = [not 0xD800 <= ord(each) <= 0xDFFF for each in marked]
        covered = {at for found in plain.finditer(text) for at in range(*found.span())}
        assert own == [at not in covered for at in range(len(text))], text


def test_a_variable_may_be_called_self():
    assert ChatTemplate("{{ x }}", {}, ControlTexts([])).render({"self": False, "x": 3}) == "3"


@pytest.mark.parametrize(
    "options", [{"messages": CHAT}, {"tools": [tool({})]}, {"n": 2}, {"response_format": {}}]
)
def test_ollamas_options_are_not_fields_of_openais(options: dict[str, Any]):
    with pytest.raises(ApiError, match=r"options\."):
        generate(OllamaPrompt(model="m", prompt="b", options=options))


def told(front: FrontEnd, sent: bytes) -> bytes:
    """Send bytes to a front end; return what it answers until it closes the connection."""
    with connect(front) as one:
        one.sendall(sent)
        return b"".join(iter(lambda: one.recv(4096), b""))


def test_two_lengths_end_the_connection(alone: Alone):
    said = told(
        alone(),
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        b"GET /v1/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    assert said.startswith(b"HTTP/1.1 400")
    assert said.count(b"HTTP/1.1") == 1


def test_no_redirect_names_the_callers_host(alone: Alone):
    get = b"GET /version/ HTTP/1.1\r\nHost: page.test\r\nConnection: close\r\n\r\n"
    said = told(alone(hosts=("*",)), get)
    assert said.startswith(b"HTTP/1.1 404")
    assert b"page.test" not in said


def test_a_stopped_models_process_is_a_503():
    error = triton_error("INTERNAL", "Stub process 'canvasrt_stream_0_0' is not healthy.")
    assert error.status == 503


def test_what_killed_servers_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = Path("/tmp") / f"python_env_{os.getpid()}"
    left.mkdir()
    monkeypatch.setattr(processes, "processes_of", lambda name: {1})
    processes.remove_stale()
    assert left.exists()  # another server may use it
    monkeypatch.setattr(processes, "processes_of", lambda name: set())
    processes.remove_stale()
    assert not left.exists()


def test_other_accounts_cannot_read_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    mine, other = tmp_path / "canvasrt-1-region", tmp_path / "canvasrt-2-region"
    for each in (mine, other):
        each.touch(0o644)
    processes.protect_shm("canvasrt-1-")
    assert [each.stat().st_mode & 0o777 for each in (mine, other)] == [0o600, 0o644]
