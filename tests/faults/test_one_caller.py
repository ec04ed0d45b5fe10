"""The work that one caller can cause, and its effect on other callers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response

from canvasrt.bundle import Bundle
from canvasrt.containers.openai.auth import Callers
from canvasrt.containers.openai.chat import chat_generation
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.generation import answer_inputs
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.middleware import Middleware, parameters_of
from canvasrt.containers.openai.tools import ChatRequest
from canvasrt.containers.tensors import ARRIVED
from canvasrt.containers.triton import grammar
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.triton.preparing import Preparing
from canvasrt.containers.triton.prompt_encoder import PromptEncoder
from canvasrt.containers.triton.request import read_request
from canvasrt.containers.triton.worker import CANCEL_CHECKS, Worker
from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.request import Block, Finished
from canvasrt.runtime.request import Request as Asked
from canvasrt.runtime.tokenizer import Tokenizer
from tests.faults.attack import GENERATE, PROMPT, over_http
from tests.helpers.one_caller import request
from tests.helpers.serving import ENDLESS, eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, ask, serving

pytestmark = pytest.mark.acceptance


@needs_triton
def test_a_long_prompt_does_not_hold_up_its_neighbours(running: Serving):
    """A prompt of 4.2 MB exceeds every context. It is refused, and others are answered meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, running, "12+34= shuffle " * 280_000)
        while not long.done():
            assert ask(running)[0] == 200
        status, body, _ = long.result()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


def test_requests_that_take_turns_have_the_tokens_of_those_that_do_not(model: Model):
    """Three requests of many blocks share one place; their tokens equal those of each request alone."""
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
    assert set(order[:5]) == set(ids)  # they took turns


def test_callers_share_the_passes(model: Model):
    """A caller with one request gets as many passes as a caller with eight."""
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


def test_long_prompts_delay_an_answer_by_two_chunks_each(model: Model):
    """A chunk takes as long as many steps. So a caller whose chunk was encoded waits while others run that many
    steps."""
    generator, size = Generator(model, max_batch=4), model.prefill_chunk
    params = request(model).params
    for hog in range(4):
        generator.add(Asked([5] * (7 * size), params, owner=f"hog {hog}"))
    generator.step()
    before = model.counters.encode_tokens
    short = generator.add(request(model, "short", max_new_tokens=40, max_denoising_steps=6))
    while not any(isinstance(e, Finished) and e.id == short for e in generator.step()):
        pass
    assert model.counters.encode_tokens - before < 2 * 4 * size


@needs_triton
def test_an_operators_limits(packaged: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The limits apply per key. Behind a proxy, Triton's ports ask for no key and accept any host."""
    monkeypatch.setenv("CANVASRT_API_KEYS", "a,b")
    options = ["--max-steps", "400", "--max-passes", "2400", "--max-n", "4"]
    options += ["--max-queue-tokens", "600", "--max-key-requests", "4", "--triton-behind-proxy"]
    with serving(packaged.path, tmp_path, *ANY_PORTS, *options) as running:

        def refused(**asked: Any) -> str:
            status, body, _ = ask(running, key="a", **asked)
            assert status == 400
            return str(body["error"]["message"])

        assert ask(running, key="a")[0] == 200
        assert over_http(running, GENERATE, PROMPT, {"Host": "evil.example"})[0] == 200
        assert "max_denoising_steps is 401" in refused(max_denoising_steps=401)
        assert "n is 5" in refused(n=5)
        assert "3200 denoising passes" in refused(n=4, max_denoising_steps=400, max_tokens=64)
        slow = {"max_denoising_steps": 400, "stability_threshold": 10_000, "max_tokens": 85}
        with ThreadPoolExecutor(4) as pool:
            first = [pool.submit(ask, running, key="a", n=2, **slow) for _ in range(2)]
            # All must be queued first: a request sent earlier would wait for its turn among them.
            assert eventually(lambda: b"_in_flight 4" in httpx.get(running.said["metrics"]).content)
            assert eventually(lambda: ask(running, key="a").status == 429)
            status, body, headers = ask(running, key="a")
            assert (status, body["error"]["type"]) == (429, "rate_limit_error")
            assert int(headers["retry-after"]) > 0
            assert ask(running, key="b")[0] == 200  # another key has its own limit
            status, body, headers = ask(running, key="b", max_tokens=300)
            assert status == 429
            assert "all requests together have" in body["error"]["message"]
            assert int(headers["retry-after"]) > 0
            for each in first:
                assert each.result()[0] == 200
        assert ask(running, key="a")[0] == 200  # the limits are free again

        def cached(key: str) -> int:
            status, body, _ = ask(running, "12+34= shuffle abdeg " * 20, key=key)
            assert status == 200
            return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

        # Numbers of cached tokens reveal nothing about prompts of other keys.
        assert cached("a") == 0
        assert cached("a") >= 128
        assert cached("b") == 0


def test_texts_and_grammars_are_not_prepared_once_for_two_keys(
    model: Model, engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    encoder = PromptEncoder(Tokenizer.load(engines), model.max_context)
    made: list[str] = []
    encode, compiled = encoder._encode, grammar.compile_grammar
    monkeypatch.setattr(encoder, "_encode", lambda *given: made.append("text") or encode(*given))
    monkeypatch.setattr(
        grammar, "compile_grammar", lambda *given: made.append("grammar") or compiled(*given)
    )
    arrays = {
        "prompt": np.array([b"12+34="], object),
        "grammar": np.array([b'{"type": "regex", "regex": "[0-9]{2}"}'], object),
    }
    for owner, more in (("a", 2), ("a", 0), ("b", 2), ("~1", 2), ("~2", 0), ("", 0)):
        before = len(made)
        read_request(arrays, model, encoder, ModelOptions(), owner)
        assert len(made) == before + more, owner


@pytest.mark.parametrize("ids", [[3, 4], [0], []])
def test_any_number_of_stop_tokens(model: Model, tokenizer: Tokenizer, ids: list[int]):
    """None, one and several stop tokens are accepted, including token 0."""
    arrays = {"prompt_ids": np.array([5]), "stop_token_ids": np.array(ids, np.int32)}
    encoder = PromptEncoder(tokenizer, model.max_context)
    params = read_request(arrays, model, encoder, ModelOptions()).request.params
    assert params.eos_token_ids == (*model.config.eos_token_ids, *ids)


def test_answers_that_a_key_waits_for_are_counted():
    callers = Callers(3)
    with callers.one("a") as more:
        more(1)
        with callers.one("a"), callers.one("b"):
            with pytest.raises(ApiError) as refused, callers.one("a"):
                pass
            assert refused.value.status == 429
            with pytest.raises(ApiError) as refused:
                more(1)
            assert refused.value.status == 429
        with pytest.raises(ApiError, match="asks for 4 answers") as refused:
            more(2)  # more than the limit, even alone
        assert refused.value.status == 400
        more(1)
    with callers.one("a") as more:
        more(2)
    with callers.one("") as more:  # without keys, there is no limit
        more(9)


@pytest.mark.parametrize("name", ["tools", "images", "messages"])
def test_all_inputs_count_times_their_answers(name: str):
    big = "x" * 600_000
    chat: dict[str, Any] = {"role": "user", "content": "a"}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f", "description": big}}]
    }
    if name == "images":
        url = f"data:image/png;base64,{'A' * 800_000}"
        chat["content"] = [{"type": "image_url", "image_url": {"url": url}}]
    elif name == "messages":
        chat["content"] = big
    body = {"model": "m", "messages": [chat], **{k: v for k, v in fields.items() if k == name}}
    assert (
        len(answer_inputs(chat_generation(ChatRequest.model_validate({**body, "n": 100})))) == 100
    )
    with pytest.raises(ApiError, match="more than this server handles") as refused:
        answer_inputs(chat_generation(ChatRequest.model_validate({**body, "n": 128})))
    assert refused.value.status == 400


def test_an_infill_s_passes_are_its_ways_times_its_steps(model: Model, engines: Bundle):
    encoder = PromptEncoder(Tokenizer.load(engines), model.max_context)
    texts = {"prompt": b"a", "infill": b"a {1-8} b"}
    arrays = {name: np.array([text], object) for name, text in texts.items()}
    arrays["max_denoising_steps"] = np.array([10], np.int32)
    read_request(arrays, model, encoder, ModelOptions(max_steps=10, max_passes=80))
    with pytest.raises(CanvasError, match="80 denoising passes"):
        read_request(arrays, model, encoder, ModelOptions(max_passes=79))
    with pytest.raises(CanvasError, match="max_denoising_steps is 10"):
        read_request(arrays, model, encoder, ModelOptions(max_steps=9))


def test_callers_take_turns_at_being_prepared():
    """Many tasks of one caller delay another caller only by the tasks that already run."""
    done: list[str] = []
    begin, failed = threading.Event(), list[BaseException]()
    preparing = Preparing(threads=1)

    class Panic(BaseException):  # like a library's panic
        pass

    def task(name: str) -> Callable[[], None]:
        def run() -> None:
            begin.wait(60)
            if name == "b2":
                raise Panic(name)
            done.append(name)

        return run

    preparing.submit("a", task("a1"), failed.append)
    assert eventually(lambda: preparing.waiting == 0)  # the first task runs
    for name in ("a2", "a3", "a4", "b1", "b2", "c1", "d1"):
        preparing.submit(name[0], task(name), failed.append)
    begin.set()
    assert eventually(lambda: preparing.waiting == 0 and len(done) == 7)
    assert done == ["a1", "a2", "b1", "c1", "d1", "a3", "a4"]
    assert [str(each) for each in failed] == ["b2"]
    preparing.close()


def test_a_request_s_time_begins_at_the_front_end():
    """The time limit begins when the body has arrived, since the caller determines how long sending takes."""
    found: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        caller = Request(scope, receive)
        await caller.body()
        found["body"] = time.monotonic()
        await asyncio.sleep(0.1)  # like waiting for images or a turn
        found.update(parameters_of(caller))
        await Response()(scope, receive, send)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.1)
        found["last"] = time.monotonic()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(Middleware(app, ServerState(), FrontMetrics(), 100)(scope, receive, send))
    assert found["last"] - 1e-5 <= found[ARRIVED] / 1e6 <= found["body"] + 1e-5


def test_cancelled_requests_cost_the_same_however_many_wait(model: Model):
    asked: list[int] = []

    class Sink:
        def event(self, event: Any) -> None: ...

        def fail(self, error: BaseException) -> None: ...

        def cancelled(self) -> bool:
            asked.append(1)
            return False

    worker = Worker(lambda: Generator(model, max_batch=2))
    for _ in range(300):
        ticket = worker.take_ticket("", Sink())
        worker.submit(request(model, max_new_tokens=2000, **ENDLESS), ticket)
    assert eventually(lambda: bool(asked))
    begin = time.monotonic()
    asked.clear()
    time.sleep(1)
    worker.close()
    rounds = (time.monotonic() - begin) / 0.05 + 2
    assert 0 < len(asked) <= rounds * (CANCEL_CHECKS + 2)
