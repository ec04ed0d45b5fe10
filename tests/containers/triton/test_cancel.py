"""A caller that goes away frees its place: the engines stop working for it."""

from __future__ import annotations

import queue
from typing import Any

import tritonclient.grpc

from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.server import Server
from tests.helpers.serving import ENDLESS, eventually, metric, needs_triton

pytestmark = needs_triton


def test_leaving_a_stream_ends_its_request(server: Server, grpc: Client):
    for event in grpc.stream({"prompt": "x", "drafts": True, **ENDLESS}):
        if event.step == 3:
            break
    assert eventually(lambda: _in_flight(server) == 0)


def test_cancelling_a_single_answer_ends_its_request(server: Server):
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call = client.async_infer(
            "canvasrt", _endless(client), lambda result, error: replies.put(error)
        )
        assert eventually(lambda: _in_flight(server) == 1)
        call.cancel()
        assert "cancelled" in str(replies.get(timeout=60)).lower()
    assert eventually(lambda: _in_flight(server) == 0)


def test_a_caller_that_drops_the_connection_is_noticed(server: Server):
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}")
    client.start_stream(lambda result, error: None)
    client.async_stream_infer("canvasrt_stream", _endless(client))
    assert eventually(lambda: _in_flight(server) == 1)
    client.stop_stream(cancel_requests=True)
    client.close()
    assert eventually(lambda: _in_flight(server) == 0)


def test_cancelled_requests_leave_the_others_alone(grpc: Client, server: Server):
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


def _in_flight(server: Server) -> float:
    return metric(server, "canvasrt_requests_in_flight")


def _endless(client: Any) -> list[Any]:
    import numpy as np

    made = []
    arrays = {"prompt": (np.array([b"x"], object), "BYTES")}
    arrays |= {name: (np.array([value], np.int32), "INT32") for name, value in ENDLESS.items()}
    for name, (array, datatype) in arrays.items():
        tensor = tritonclient.grpc.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made
