"""A caller that goes away frees its place: the engines stop working for it."""

from __future__ import annotations

import queue
from typing import Any

import tritonclient.grpc

from canvasrt.containers.client.triton import Client, make_tensors
from canvasrt.containers.serve.server import Server
from tests.helpers.serving import ENDLESS, eventually, metric, needs_triton

pytestmark = needs_triton


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
    assert eventually(lambda: _in_flight(server) == 0)


def test_cancelling_a_single_answer_ends_its_request(server: Server):
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tensors = make_tensors(tritonclient.grpc, {"prompt": "x", **ENDLESS})
        call = client.async_infer("canvasrt", tensors, lambda result, error: replies.put(error))
        assert eventually(lambda: _in_flight(server) == 1)
        call.cancel()
        assert "cancelled" in str(replies.get(timeout=60)).lower()
    assert eventually(lambda: _in_flight(server) == 0)


def _in_flight(server: Server) -> float:
    return metric(server, "canvasrt_requests_in_flight")
