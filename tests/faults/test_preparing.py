"""Preparing requests on separate threads: preparations that hang, take long, or are refused repeatedly."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc

from canvasrt.bundle import Bundle
from canvasrt.containers.tensors import ARRIVED
from canvasrt.containers.triton import grammar
from canvasrt.containers.triton.shared import Shared
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.answers.grammar import GrammarState
from canvasrt.runtime.model import Model
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.faulty import DIGITS, Faulty, faulty_package
from tests.helpers.serving import ENDLESS, eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, ask, call, serving

pytestmark = pytest.mark.acceptance
METRICS = "/v1/metrics"


@pytest.fixture
def faulty(packaged: Bundle, tmp_path: Path) -> Faulty:
    return faulty_package(packaged, tmp_path / "faulty")


@needs_triton
def test_what_only_takes_long_is_not_ended(faulty: Faulty, tmp_path: Path):
    """Other requests are answered even if all grammar searches hang for longer than a pass may take. Together, many
    slow requests may take longer than the limit for one."""
    with (
        serving(faulty.path, tmp_path, *ANY_PORTS, "--stall-timeout", "4") as running,
        ThreadPoolExecutor(8) as pool,
    ):
        assert ask(running, **DIGITS)[0] == 200
        for fault, count in (("search 8", 6), ("read 2", 8)):
            faulty.set(fault)
            asked = [pool.submit(ask, running, seed=each, **DIGITS) for each in range(count)]
            if fault == "search 8":
                assert eventually(lambda: b"_in_flight 6" in call(running.host, METRICS).body)
                assert ask(running)[0] == 200
                assert not any(each.done() for each in asked)
            assert [each.result()[0] for each in asked] == [200] * count


@needs_triton
def test_time_that_is_over_is_told_wherever_a_request_is(faulty: Faulty, tmp_path: Path):
    """The time may be over when a request arrives, in its passes, or while it is prepared."""
    with serving(faulty.path, tmp_path, *ANY_PORTS, "--request-timeout", "3") as running:

        def arrives(at: Any) -> str:
            with grpc.InferenceServerClient(running.said["grpc"]) as client:
                try:
                    client.infer("canvasrt", [prompt], parameters={ARRIVED: at})
                except grpc.InferenceServerException as error:
                    return str(error)
            return "answered"

        prompt = grpc.InferInput("prompt", [1], "BYTES")
        prompt.set_data_from_numpy(np.array([b"12+34="], object))
        now = time.monotonic() * 1e6
        assert arrives(int(now)) == arrives(int(now + 1e12)) == "answered"
        assert "longer than 3 s" in arrives(int(now - 4e6))
        assert "canvasrt_arrived is 'x'" in arrives("x")
        status, body, _ = ask(running, max_tokens=4000, **ENDLESS)
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        assert ask(running, **DIGITS)[0] == 200
        faulty.set("read")  # hangs forever
        with ThreadPoolExecutor(3) as pool:
            # There are two threads, so one request waits.
            asked = [pool.submit(ask, running, **DIGITS) for _ in range(3)]
            assert [each.result()[0] for each in asked] == [504] * 3
        faulty.set("")
        assert ask(running, **DIGITS)[0] == 200


def test_a_refused_grammar_is_compiled_once_for_a_while(
    model: Model, engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []
    check = grammar.GrammarSandbox.check
    monkeypatch.setattr(
        grammar.GrammarSandbox, "check", lambda *given: made.append("") or check(*given)
    )
    tokenizer = Tokenizer.load(engines)

    def refused(owner: str) -> None:
        text = '{"type": "regex", "regex": "a{3000}"}'
        with pytest.raises(CanvasError, match="no answer of at most"):
            grammar.read_grammar(text, model, tokenizer, owner)

    for owner in ("a", "a", "b", "b"):
        refused(owner)
    assert len(made) == 2
    monkeypatch.setattr(grammar, "REFUSED_FOR", 0.0)
    refused("a")
    assert len(made) == 3


def test_a_grammar_that_could_not_be_tried_is_not_refused(
    model: Model, engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    """The failure is the server's, so the next request with the same grammar is tried again."""

    def fails(*_: Any) -> None:
        raise EngineError("no answer")

    tokenizer = Tokenizer.load(engines)
    text = '{"type": "regex", "regex": "[0-9]{4}"}'
    with monkeypatch.context() as broken:
        broken.setattr(grammar.GrammarSandbox, "check", fails)
        with pytest.raises(EngineError):
            grammar.read_grammar(text, model, tokenizer)
    assert not grammar.read_grammar(text, model, tokenizer).accepts


def test_answers_to_one_request_wait_for_one_compilation(
    model: Model, engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []
    compiled = grammar.compile_grammar

    def slow(*given: Any) -> GrammarState:
        made.append("")
        time.sleep(0.5)
        return compiled(*given)

    monkeypatch.setattr(grammar, "compile_grammar", slow)
    tokenizer = Tokenizer.load(engines)
    text = '{"type": "regex", "regex": "[0-9]{3}"}'
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(grammar.read_grammar, text, model, tokenizer) for _ in range(4)]
        assert len({id(each.result()) for each in asked}) == 1
    assert len(made) == 1


def test_a_panic_is_raised_for_all_who_wait():
    """A panic is not an Exception. If it were not passed on, callers would wait forever."""

    class Panic(BaseException):
        pass

    shared = Shared[int](4, 4, lambda _: 1)
    begun, go = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        assert go.wait(60)
        raise Panic

    def get() -> BaseException | None:
        try:
            shared.get(b"key", work)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(get)
        assert begun.wait(60)
        second = pool.submit(get)
        time.sleep(0.1)
        go.set()
        assert isinstance(first.result(60), Panic)
        assert isinstance(second.result(60), Panic)
    assert shared.get(b"key", lambda: 3) == 3
