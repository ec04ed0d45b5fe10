"""Texts, tensors and stop strings of any size: their cost, and when they are refused."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from canvasrt.containers.triton.inputs import check_shapes
from canvasrt.containers.triton.prompt_encoder import PromptEncoder
from canvasrt.containers.triton.stops import StopCutter
from canvasrt.errors import CanvasError
from canvasrt.runtime.conditions import read_conditions
from canvasrt.runtime.tokenizer import StreamDecoder, Tokenizer
from tests.helpers.serving import needs_triton
from tests.helpers.serving_process import Serving, ask, call

pytestmark = pytest.mark.acceptance


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


def test_text_beyond_any_context_is_not_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    encoder = PromptEncoder(tokenizer, 100)
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_encode", lambda *given: pytest.fail("it was encoded"))
        with pytest.raises(CanvasError, match="exceed the context of 100 tokens"):
            encoder.encode({"prompt": "a" * 4_200_000, "raw": True})
    most = 100 * tokenizer.longest_token
    assert encoder.encode({"prompt": "a" * most, "raw": True}).ids.size > 0


def test_short_texts_do_not_wait_for_long_ones(tokenizer: Tokenizer):
    encoder = PromptEncoder(tokenizer, 100)
    short = {"prompt": "ab", "raw": True}
    options = {"add_special_tokens": False}
    with ThreadPoolExecutor(1) as pool, encoder._long:
        assert pool.submit(encoder._tokens, short, options, "").result(timeout=60)


def longest_pause(tokenizer: Tokenizer) -> float:
    """Return for which part of a long text's encoding another thread could not run."""
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
    return max(pauses) / took


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer):
    """A busy machine may stop the other thread, too, but not in all of the tries."""
    assert any(longest_pause(tokenizer) < 0.5 for _ in range(10))


def test_large_tensors_are_refused_by_their_shape():
    for shapes, says in (
        ({"prompt_ids": [10**9]}, "exceed the context of 4096"),
        ({"stop": [10**9]}, "1000000000 strings"),
        ({"stop_token_ids": [10**9]}, "1000000000 elements"),
        ({"prompt": [10**9]}, "not [1]"),
        ({"seed": [10**9]}, "not [1]"),
        ({"prompt_ids": [2, 3]}, "as one list"),
    ):
        with pytest.raises(CanvasError) as caught:
            check_shapes(shapes, 4096, 32)
        assert says in caught.value.message + caught.value.hint
    check_shapes({"prompt": [1], "prompt_ids": [4096], "stop": [16]}, 4096, 32)


@needs_triton
def test_eight_million_token_ids_are_refused_at_once(running: Serving):
    text = b'{"model": "canvasrt", "prompt": [' + b",".join([b"1"] * 8_000_000) + b"]}"

    def send() -> str:
        connection = http.client.HTTPConnection(running.host, timeout=60)
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError):  # the answer may come before everything is sent
            connection.request("POST", "/v1/completions", text, headers)
        try:
            return str(json.loads(connection.getresponse().read())["error"]["code"])
        except (OSError, http.client.HTTPException):
            return "closed"

    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(send)
        while not reply.done():
            assert ask(running)[0] == 200
    assert reply.result() in ("invalid_json", "closed")  # too many values


@needs_triton
def test_too_many_token_ids_are_refused_before_they_are_sent_on(running: Serving):
    asked = {"model": "canvasrt", "prompt": [1] * 5000}
    reply = call(running.host, "/v1/completions", asked)
    assert reply.body["error"]["code"] == "context_length_exceeded"


def test_stop_strings_take_linear_time():
    def seconds(length: int) -> float:
        cutter = StopCutter(["a" * length + "b"])
        begin = time.thread_time()
        for _ in range(3):
            cutter.put("a" * length)
        return time.thread_time() - begin

    short = min(seconds(20_000) for _ in range(3))
    assert min(seconds(200_000) for _ in range(2)) < 30 * short


@needs_triton
@pytest.mark.parametrize("stop", ["x" * 1001, ["y" * 5000]])
def test_long_stop_strings_are_refused(running: Serving, stop: Any):
    status, body, _ = ask(running, stop=stop)
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


def test_positions_with_equal_lists_are_sampled_together():
    """If they were sampled separately, every position would take as long as all together."""
    listed = [[5, 6], [5, 6], [7, 8]]
    conditions = read_conditions({"allow": dict(zip("012", listed, strict=True))})
    found = conditions.allowed(0, 3, 10, ())
    assert found[0] is found[1]
    assert [each.tolist() for each in found.values()] == listed
