"""What one caller can make the server do, and what its neighbours notice of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.openai.connections import RESERVED
from canvasrt.containers.tensors import check_shapes
from canvasrt.containers.triton.prompts import PromptEncoder
from canvasrt.containers.triton.stops import StopCutter
from canvasrt.containers.triton.worker import CANCEL_CHECKS, Worker
from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Block, Finished, Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling import SamplingParams
from canvasrt.runtime.tokenizer import StreamDecoder, Tokenizer
from tests.helpers.serving import ENDLESS, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, serving

SHORT: dict[str, Any] = {"max_tokens": 3, "max_denoising_steps": 2}


@pytest.fixture(scope="module")
def running(packaged: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("one-caller")
    with serving(packaged.path, folder, *ANY_PORTS, "--max-connections", "40") as found:
        yield found


def address(running: Serving) -> str:
    return running.said["openai"].removeprefix("http://").partition("/")[0]


def ask(
    running: Serving, content: str = "12+34=", key: str = "none", **options: Any
) -> tuple[int, Any, float, Any]:
    """A chat's status, body, seconds, and headers."""
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": content}]}
    connection = http.client.HTTPConnection(address(running), timeout=120)
    begin = time.monotonic()
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        text = json.dumps({**body, **SHORT, **options})
        connection.request("POST", "/v1/chat/completions", text, headers)
        reply = connection.getresponse()
        data = json.loads(reply.read())
        return reply.status, data, time.monotonic() - begin, reply.headers
    finally:
        connection.close()


@needs_triton
def test_a_long_prompt_does_not_hold_up_its_neighbours(running: Serving):
    """4.2 MB, more than any context: refused, while others are answered as before."""
    alone = max(ask(running)[2] for _ in range(5))
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, running, "12+34= shuffle " * 280_000)
        time.sleep(0.3)
        waited = []
        while not long.done() or not waited:
            waited.append(ask(running)[2])
        status, body, _, _ = long.result()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert max(waited) < alone + 1.0


@needs_triton
def test_n_long_answers_do_not_starve_a_short_request(running: Serving):
    hog = http.client.HTTPConnection(address(running), timeout=120)
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": "a"}], "n": 4}
    text = json.dumps({**body, **ENDLESS, "max_tokens": 4000})
    hog.request("POST", "/v1/chat/completions", text, {"Content-Type": "application/json"})
    time.sleep(0.5)
    try:
        status, _, seconds, _ = ask(running)
    finally:
        hog.close()
    assert status == 200
    assert seconds < 3


@pytest.fixture(scope="module")
def model(engines: Bundle) -> Model:
    return open_model(engines.path, threads=1)


def request(model: Model, owner: str = "", **options: Any) -> Request:
    params = SamplingParams.from_defaults(
        model.sampler, model.config, **{"max_new_tokens": 4, "max_denoising_steps": 2, **options}
    )
    return Request([2, 5, 6], params, owner=owner)


def test_requests_that_take_turns_have_the_tokens_of_those_that_do_not(model: Model):
    """Three requests of many blocks over one place, against each of them alone."""
    options = {"max_new_tokens": 150, "max_denoising_steps": 14, "stability_threshold": 10_000}
    wanted = [request(model, seed=seed, **options) for seed in range(3)]
    alone = [Generator(model).run([each])[0].token_ids for each in wanted]
    generator = Generator(model, max_batch=1)
    ids = [generator.add(each) for each in wanted]
    ends, order = {}, []
    while not generator.idle:
        for event in generator.step():
            if isinstance(event, Finished):
                ends[event.id] = event.result.token_ids
            elif isinstance(event, Block):
                order.append(event.id)
    assert [ends[id] for id in ids] == alone
    assert set(order[:5]) == set(ids)  # they did take turns


def test_callers_share_the_passes(model: Model):
    """One with a single request gets as much as one with eight."""
    generator = Generator(model, max_batch=2)
    endless = {"max_new_tokens": 2000, **ENDLESS}
    many = [generator.add(request(model, "many", seed=seed, **endless)) for seed in range(8)]
    for _ in range(20):
        generator.step()
    one = generator.add(request(model, "one", **endless))
    steps: dict[int, int] = dict.fromkeys([*many, one], 0)
    for _ in range(200):
        for event in generator.step():
            steps[event.id] += 1
    assert steps[one] > 0.4 * sum(steps.values())
    shares = [steps[id] for id in many]
    assert min(shares) > 0.5 * max(shares)
    for id in steps:
        generator.cancel(id)
    generator.step()


@contextlib.contextmanager
def limited(packaged: Bundle, folder: Path, *options: str) -> Iterator[Serving]:
    with serving(packaged.path, folder, *ANY_PORTS, *options) as found:
        yield found


@needs_triton
def test_an_operators_limits(packaged: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CANVASRT_API_KEYS", "a,b")
    options = ["--max-steps", "100", "--max-passes", "600", "--max-n", "4"]
    options += ["--max-queue-tokens", "600", "--max-key-requests", "2", "--request-timeout", "4"]
    with limited(packaged, tmp_path, *options) as running:

        def refused(**asked: Any) -> str:
            status, body, _, _ = ask(running, key="a", **asked)
            assert status == 400
            return str(body["error"]["message"])

        assert ask(running, key="a")[0] == 200
        assert "max_denoising_steps is 101" in refused(max_denoising_steps=101)
        assert "n is 5" in refused(n=5)
        assert "800 denoising passes" in refused(n=4, max_denoising_steps=100, max_tokens=64)
        slow = {"max_denoising_steps": 100, "stability_threshold": 10_000, "max_tokens": 190}
        with ThreadPoolExecutor(4) as pool:
            first = [pool.submit(ask, running, key="a", **slow) for _ in range(2)]
            time.sleep(0.5)
            status, body, _, headers = ask(running, key="a")
            assert (status, body["error"]["type"]) == (429, "rate_limit_error")
            assert int(headers["retry-after"]) > 0
            assert ask(running, key="b")[0] == 200  # another key has its own
            status, body, _, headers = ask(running, key="b", max_tokens=300)
            assert status == 429
            assert "tokens are waiting" in body["error"]["message"]
            assert int(headers["retry-after"]) > 0
            for each in first:
                assert each.result()[0] in (200, 504)
        assert ask(running, key="a")[0] == 200  # everything was given back
        begin = time.monotonic()
        for name in ("stream", "whole"):
            ends = {"max_denoising_steps": 100, "stability_threshold": 10_000, "max_tokens": 190}
            if name == "whole":
                assert ask(running, key="a", **ends)[0] in (200, 504)
        assert time.monotonic() - begin < 20


def test_a_request_has_a_deadline(model: Model):
    ends: dict[str, Any] = {}

    class Sink:
        def event(self, event: Any) -> None:
            if isinstance(event, Finished):
                ends["result"] = event.result

        def fail(self, error: Exception) -> None:
            ends["error"] = error

        def cancelled(self) -> bool:
            return False

    worker = Worker(lambda: Generator(model), timeout=0.5)
    begin = time.monotonic()
    worker.submit(request(model, max_new_tokens=2000, **ENDLESS), Sink())
    while not ends and time.monotonic() - begin < 20:
        time.sleep(0.02)
    worker.close()
    assert "longer than 0.5 s" in ends["error"].message
    assert 0.4 < time.monotonic() - begin < 10


def test_a_prompt_is_encoded_once_for_all_of_its_answers():
    class Counting:
        longest_token, has_template, count = 8, True, 0

        def open_chat(self, *chat: Any) -> tuple[list[int], str]:
            Counting.count += 1
            time.sleep(0.1)
            return [1, 2, 3], ""

    encoder = PromptEncoder(Counting(), 100)  # type: ignore[arg-type]
    values = {"messages": '[{"role": "user", "content": "a"}]'}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: encoder.encode(values), range(8)))
    assert Counting.count == 1
    assert all(each.ids.tolist() == [1, 2, 3] for each in found)


def test_text_beyond_any_context_is_not_encoded(tokenizer: Tokenizer):
    encoder = PromptEncoder(tokenizer, 100)
    begin = time.monotonic()
    with pytest.raises(CanvasError, match="exceed the context of 100 tokens"):
        encoder.encode({"prompt": "a" * 4_200_000, "raw": True})
    assert time.monotonic() - begin < 0.5
    most = 100 * tokenizer.longest_token
    assert encoder.encode({"prompt": "a" * most, "raw": True}).ids.size > 0


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer):
    pauses, done = [], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            pauses.append(time.perf_counter() - last)
            last = time.perf_counter()

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    tokenizer.encode("12+34= shuffle abdeg " * 100_000)
    took = time.perf_counter() - begin
    done.set()
    thread.join()
    assert max(pauses) < took / 2


def test_large_tensors_are_refused_by_their_shape():
    for shapes, says in (
        ({"prompt_ids": [10**9]}, "exceed the context of 4096"),
        ({"stop": [10**9]}, "1000000000 strings"),
        ({"prompt": [10**9]}, "not [1]"),
        ({"seed": [10**9]}, "not [1]"),
        ({"prompt_ids": [2, 3]}, "as one list"),
    ):
        with pytest.raises(CanvasError) as caught:
            check_shapes(shapes, 4096)
        assert says in caught.value.message + caught.value.hint
    check_shapes({"prompt": [1], "prompt_ids": [4096], "stop": [16]}, 4096)


@needs_triton
def test_eight_million_token_ids_are_refused_at_once(running: Serving):
    text = b'{"model": "canvasrt", "prompt": [' + b",".join([b"1"] * 8_000_000) + b"]}"

    def send() -> str:
        connection = http.client.HTTPConnection(address(running), timeout=60)
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError):  # it is answered before all of it was sent
            connection.request("POST", "/v1/completions", text, headers)
        try:
            return str(json.loads(connection.getresponse().read())["error"]["code"])
        except (OSError, http.client.HTTPException):
            return "closed"

    waited = []
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(send)
        while not reply.done():
            waited.append(ask(running)[2])
    assert reply.result() in ("context_length_exceeded", "closed")
    assert max(waited, default=0) < 5.0


@needs_triton
def test_too_many_token_ids_are_refused_before_they_are_sent_on(running: Serving):
    text = json.dumps({"model": "canvasrt", "prompt": [1] * 5000})
    connection = http.client.HTTPConnection(address(running), timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", text, headers)
    reply = json.loads(connection.getresponse().read())
    assert reply["error"]["code"] == "context_length_exceeded"


def test_stop_strings_take_linear_time():
    def seconds(length: int) -> float:
        cutter = StopCutter(["a" * length + "b"])
        begin = time.perf_counter()
        for _ in range(3):
            cutter.put("a" * length)
        return time.perf_counter() - begin

    short = min(seconds(20_000) for _ in range(3))
    assert min(seconds(200_000) for _ in range(2)) < 30 * short


@needs_triton
@pytest.mark.parametrize("stop", ["x" * 1001, ["y" * 5000]])
def test_long_stop_strings_are_refused(running: Serving, stop: Any):
    status, body, _, _ = ask(running, stop=stop)
    assert status == 400
    assert body["error"]["param"].startswith("stop")


def test_blocks_are_decoded_once(tokenizer: Tokenizer):
    decoded = 0

    class Counting:
        def decode(self, ids: list[int], keep_control: bool = False) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids)

    decoder = StreamDecoder(Counting())  # type: ignore[arg-type]
    draw = random.Random(3)
    ids = [draw.randrange(3, 112) for _ in range(20_000)]
    text = ""
    for begin in range(0, len(ids), 32):
        text += decoder.put(ids[begin : begin + 32], final=begin + 32 >= len(ids))
    assert text == tokenizer.decode(ids)
    assert decoded < 5 * len(ids)


def test_cancelled_requests_cost_the_same_however_many_wait(model: Model):
    asked: list[int] = []

    class Sink:
        def event(self, event: Any) -> None: ...

        def fail(self, error: Exception) -> None: ...

        def cancelled(self) -> bool:
            asked.append(1)
            return False

    worker = Worker(lambda: Generator(model, max_batch=2))
    for _ in range(300):
        worker.submit(request(model, max_new_tokens=2000, **ENDLESS), Sink())
    time.sleep(0.5)
    asked.clear()
    begin = time.monotonic()
    time.sleep(1)
    rounds = (time.monotonic() - begin) / 0.05 + 2
    worker.close()
    assert 0 < len(asked) <= rounds * (CANCEL_CHECKS + 2)


@needs_triton
def test_half_sent_requests_are_closed(running: Serving):
    host, _, port = address(running).partition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        begin = time.monotonic()
        connection.sendall(head)
        for byte in b"ngth: 10"[:6]:  # bytes that trickle in do not help
            time.sleep(1)
            connection.sendall(bytes([byte]))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        assert 5 < time.monotonic() - begin < 15


@needs_triton
def test_health_answers_when_clients_hold_every_connection(running: Serving):
    host, _, port = address(running).partition(":")
    held = []
    try:
        for _ in range(40 + RESERVED + 20):
            each = socket.create_connection((host, int(port)), timeout=30)
            each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            held.append(each)
        for path in ("live", "ready"):
            connection = http.client.HTTPConnection(host, int(port), timeout=5)
            connection.request("GET", f"/v1/health/{path}")
            assert connection.getresponse().status == 200
            connection.close()
        assert ask(running)[1]["error"]["code"] == "too_many_connections"
    finally:
        for each in held:
            each.close()
    time.sleep(0.3)
    assert ask(running)[0] == 200


@needs_triton
def test_tiny_chunks_are_cut_off(running: Serving):
    """The body that crashes old versions of Triton, sent to the front end instead."""
    host, _, port = address(running).partition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            connection.sendall(head + b"1\r\nx\r\n" * 800_000 + b"0\r\n\r\n")
            assert connection.recv(1) == b""
        assert time.monotonic() - begin < 5
    assert ask(running)[0] == 200


def test_token_ids_stay_an_array(model: Model):
    ids = np.array([2, 5, 6], np.int32)
    params = SamplingParams.from_defaults(model.sampler, model.config, max_new_tokens=4)
    (result,) = Generator(model).run([Request(ids, params)])
    assert result.prompt_token_ids == [2, 5, 6]
