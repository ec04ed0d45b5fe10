"""The requests that the front end sends to Triton, and the reuse of streams for further requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import tritonclient.grpc
from tritonclient.grpc._utils import _get_inference_request

from canvasrt.containers.client.triton import Client, StreamEvent, make_tensors
from canvasrt.containers.openai.upstream import Upstream, encode
from canvasrt.containers.serve.server import Server
from canvasrt.containers.tensors import STREAM_MODEL
from tests.helpers.serving import ENDLESS, needs_triton

pytestmark = needs_triton
SHORT: dict[str, Any] = {"seed": 7, "max_new_tokens": 40, "max_denoising_steps": 6}


def test_a_request_is_encoded_as_the_client_library_does() -> None:
    inputs = {
        "prompt": "é\n",
        "prompt_ids": [1, 2, 3],
        "seed": 2**64 - 1,
        "early_stop": False,
        "t_min": 0.25,
        "stop": ["", "bcd"],
        "max_new_tokens": None,
    }
    ours = encode(inputs, {"canvasrt_errors": 1, "who": "me"})
    theirs = _get_inference_request(
        STREAM_MODEL,
        make_tensors(tritonclient.grpc, inputs),
        model_version="",
        request_id="",
        outputs=None,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters={"canvasrt_errors": 1, "who": "me"},
    )
    assert ours == theirs


async def all_of(upstream: Upstream, **inputs: Any) -> list[StreamEvent]:
    return [event async for event in upstream.stream({**inputs, **SHORT})]


def test_a_stream_carries_one_request_after_another(server: Server, grpc: Client) -> None:
    async def ask() -> tuple[list[list[StreamEvent]], list[Any]]:
        upstream = Upstream(f"127.0.0.1:{server.ports.grpc}")
        found, streams = [], []
        for prompt in ("12+34=", "sort 4017"):
            found.append(await all_of(upstream, prompt=prompt, drafts=True))
            streams += upstream._idle
        await upstream.close()
        return found, streams

    found, (first, second) = asyncio.run(ask())
    assert first is second
    for prompt, events in zip(("12+34=", "sort 4017"), found, strict=True):
        expected = list(grpc.stream({"prompt": prompt, "drafts": True, **SHORT}))
        without = [{**vars(event), "cached_tokens": 0} for event in events]
        assert without == [{**vars(event), "cached_tokens": 0} for event in expected]


def test_a_stream_that_was_left_is_not_used_again(server: Server) -> None:
    async def ask() -> int:
        upstream = Upstream(f"127.0.0.1:{server.ports.grpc}")
        endless = upstream.stream({"prompt": "x", "drafts": True, **ENDLESS})
        async with contextlib.aclosing(endless) as events:
            async for _ in events:
                break
        left = len(upstream._idle)
        assert (await all_of(upstream, prompt="12+34="))[-1].event == "final"
        await upstream.close()
        return left

    assert asyncio.run(ask()) == 0


def test_requests_side_by_side_have_streams_of_their_own(server: Server) -> None:
    async def ask() -> list[list[StreamEvent]]:
        upstream = Upstream(f"127.0.0.1:{server.ports.grpc}")
        found = await asyncio.gather(*(all_of(upstream, prompt=f"sort {n}") for n in range(5)))
        assert len(upstream._idle) == 5
        alone = [await all_of(upstream, prompt=f"sort {n}") for n in range(5)]
        assert [events[-1].text for events in found] == [events[-1].text for events in alone]
        await upstream.close()
        return found

    assert len(asyncio.run(ask())) == 5
