"""Answers of a real tritonserver over every protocol, and callers that leave early."""

from __future__ import annotations

import json
import queue
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.grpc

from canvasrt.containers.client.triton import Client, make_tensors
from canvasrt.containers.serve.server import Server
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.serving import ENDLESS, Local, eventually, metric, needs_triton

pytestmark = needs_triton
SHORT: dict[str, Any] = {"seed": 7, "max_new_tokens": 40, "max_denoising_steps": 6}


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest) -> Client:
    return request.getfixturevalue(request.param)


def test_an_answer_is_that_of_the_process(client: Client, local: Local, tokenizer: Tokenizer):
    """Floats keep the decimal value that was sent, and the largest seed is not changed."""
    options = {**SHORT, "seed": 2**64 - 1, "entropy_bound": 0.7, "t_min": 0.3, "t_max": 1.1}
    answer = client.infer({"prompt": "12+34=", **options})
    expected = local("12+34=", **options)
    assert answer.token_ids == expected.token_ids
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert answer.steps == expected.steps
    assert answer.finish_reason == expected.finish_reason
    assert answer.text == tokenizer.decode(expected.token_ids)
    assert answer.seed == 2**64 - 1


def test_without_options_the_checkpoints_own_hold(client: Client):
    answer = client.infer({"prompt": "upper hello", "max_new_tokens": 8})
    assert (answer.steps, answer.logprobs) == ([48], "")


def test_messages_and_token_ids_say_the_same_as_a_prompt(client: Client):
    by_prompt = client.infer({"prompt": "sort 4017", **SHORT})
    messages = json.dumps([{"role": "user", "content": "sort 4017"}])
    by_messages = client.infer({"messages": messages, **SHORT})
    by_ids = client.infer({"prompt_ids": by_prompt.prompt_token_ids, **SHORT})
    assert by_messages.token_ids == by_ids.token_ids == by_prompt.token_ids


def test_a_stream_ends_with_the_answer(grpc: Client):
    answer = grpc.infer({"prompt": "12+34=", **SHORT})
    events = list(grpc.stream({"prompt": "12+34=", **SHORT}))
    blocks = [event for event in events if event.event == "block"]
    assert [event.event for event in events] == ["block", "block", "final"]
    assert [event.block for event in blocks] == [0, 1]
    assert "".join(event.text for event in blocks) == events[-1].text == answer.text
    assert [token for event in blocks for token in event.token_ids] == events[-1].token_ids
    assert events[-1].token_ids == answer.token_ids
    assert [event.finish_reason for event in events] == ["", "", "length"]
    assert [event.steps for event in events] == [answer.steps[:1], answer.steps, answer.steps]


def test_drafts_are_the_canvas_after_every_step(grpc: Client):
    events = list(grpc.stream({"prompt": "12+34=", "drafts": True, **SHORT}))
    drafts = [event for event in events if event.event == "draft"]
    last = events[-1]
    assert [(event.block, event.step) for event in drafts] == [
        (block, step) for block, steps in enumerate(last.steps) for step in range(1, steps + 1)
    ]
    assert all(len(event.token_ids) == 32 for event in drafts)
    finished = [event for event in drafts if event.step == last.steps[event.block]]
    assert finished[0].token_ids == last.token_ids[:32]


def test_the_generate_endpoint_takes_and_gives_json(server: Server, http: Client):
    reply = json.loads(_post(server, "canvasrt/generate", {"prompt": "12+34=", **SHORT}))
    answer = http.infer({"prompt": "12+34=", **SHORT})
    assert reply["text"] == answer.text
    assert reply["token_ids"] == answer.token_ids
    assert reply["finish_reason"] == "length"


def test_the_generate_stream_endpoint_sends_events(server: Server):
    body = {"prompt": "12+34=", "drafts": True, **SHORT}
    lines = _post(server, "canvasrt_stream/generate_stream", body).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [event["event"] for event in events].count("block") == 2
    assert [event["event"] for event in events].count("draft") == 12
    assert events[-1]["event"] == "final"


def test_answers_do_not_depend_on_what_else_is_asked(server: Server, local: Local):
    """Sends eight concurrent requests with different settings, half of them streams."""
    asked = [
        (f"{n}+{n}=", {"seed": n, "max_new_tokens": 20 + 9 * n, "max_denoising_steps": 3 + n})
        for n in range(8)
    ]

    def ask(number: int) -> list[int]:
        prompt, options = asked[number]
        protocol, port = [("http", server.ports.http), ("grpc", server.ports.grpc)][number % 2]
        with Client(f"127.0.0.1:{port}", protocol, timeout=120) as client:  # type: ignore[arg-type]
            if number % 4 == 3:
                *_, last = client.stream({"prompt": prompt, **options})
                return last.token_ids
            return client.infer({"prompt": prompt, **options}).token_ids

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [local(prompt, **options).token_ids for prompt, options in asked]


def test_a_long_request_does_not_hold_up_a_short_one(grpc: Client, http: Client):
    long = grpc.stream({"prompt": "x", "drafts": True, **ENDLESS})
    assert next(long).step == 1
    assert len(http.infer({"prompt": "12+34=", **SHORT}).steps) == 2
    step = next(long).step
    assert step == 2
    long.close()


def test_leaving_a_stream_ends_its_request_and_leaves_others_alone(grpc: Client, server: Server):
    options: dict[str, Any] = {"seed": 5, "max_new_tokens": 60, "max_denoising_steps": 20}
    alone = grpc.infer({"prompt": "12+34=", **options})
    with Client(f"127.0.0.1:{server.ports.grpc}", "grpc") as other:
        leaving = other.stream({"prompt": "x", "drafts": True, **ENDLESS})
        assert next(leaving).event == "draft"
        events = grpc.stream({"prompt": "12+34=", "drafts": True, **options})
        assert next(events).step == 1
        leaving.close()
        *_, last = events
    assert last.token_ids == alone.token_ids
    assert eventually(lambda: metric(server, "canvasrt_requests_in_flight") == 0)


def test_cancelling_a_single_answer_ends_its_request(server: Server):
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tensors = make_tensors(tritonclient.grpc, {"prompt": "x", **ENDLESS})
        call = client.async_infer("canvasrt", tensors, lambda result, error: replies.put(error))
        assert eventually(lambda: metric(server, "canvasrt_requests_in_flight") == 1)
        call.cancel()
        assert "cancelled" in str(replies.get(timeout=60)).lower()
    assert eventually(lambda: metric(server, "canvasrt_requests_in_flight") == 0)


def _post(server: Server, path: str, body: dict[str, Any]) -> str:
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/{path}"
    with urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=120) as reply:
        return reply.read().decode()
