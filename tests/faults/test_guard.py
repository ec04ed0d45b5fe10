"""The guard in front of Triton's ports: it determines who the caller is, whatever the caller claims."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from canvasrt.bundle import Bundle
from canvasrt.containers.client.triton import Client
from canvasrt.containers.tensors import OWNER
from canvasrt.errors import CanvasError
from tests.faults.attack import GENERATE, PROMPT, over_http
from tests.helpers.serving import ENDLESS, eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, JSON, Serving, chat, serving

pytestmark = needs_triton


@pytest.fixture(scope="module")
def keyed(packaged: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with two keys, each of which may have one answer at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANVASRT_API_KEYS", "sesame,open")
        folder = tmp_path_factory.mktemp("keyed")
        with serving(packaged.path, folder, *ANY_PORTS, "--max-key-requests", "1") as found:
            yield found


def triton(
    running: Serving, path: str, body: Any, key: str = "open", **headers: str
) -> tuple[int, str]:
    given = {**JSON, "Authorization": f"Bearer {key}", **headers}
    return over_http(running, path, body, given)


def test_a_header_names_no_caller(keyed: Serving):
    assert triton(keyed, GENERATE, PROMPT, **{OWNER: "0123456789abcdef"})[0] == 200


def prompt(text: str = "12+34=") -> list[grpc.InferInput]:
    made = grpc.InferInput("prompt", [1], "BYTES")
    made.set_data_from_numpy(np.array([text.encode()], np.object_))
    return [made]


def over_grpc(running: Serving, key: str = "open", **options: Any) -> None:
    given = {"inputs": prompt(), "headers": {"authorization": f"Bearer {key}"}, **options}
    with grpc.InferenceServerClient(running.said["grpc"]) as client:
        assert client.infer("canvasrt", **given).as_numpy("text")[0]


def test_grpc_names_no_caller(keyed: Serving):
    over_grpc(keyed, parameters={OWNER: "0123456789abcdef"})


# For classification, Triton divides by the size of the output's type, which is 0 for text.
CLASSIFIED = [grpc.InferRequestedOutput("text", class_count=1)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"outputs": CLASSIFIED}, "cannot be classified"),
        ({"inputs": prompt("." * (17 * 2**20))}, "larger than max"),
        ({"compression_algorithm": "gzip"}, "is disabled"),
        ({"headers": {}}, "did not provide an API key"),
        ({"headers": {"authorization": "Bearer wrong"}}, "Incorrect API key"),
    ],
    ids=range(5),
)
def test_tritons_grpc_port_is_guarded(keyed: Serving, options: dict[str, Any], says: str):
    with pytest.raises(InferenceServerException, match=says):
        over_grpc(keyed, **options)
    over_grpc(keyed)  # the server still works


def test_keys_guard_tritons_ports(keyed: Serving, monkeypatch: pytest.MonkeyPatch):
    assert over_http(keyed, GENERATE, PROMPT)[0] == 401
    monkeypatch.setenv("CANVASRT_API_KEY", "sesame")
    with keyed.client() as client, Client(keyed.said["grpc"], "grpc") as other:
        assert client.infer(PROMPT).text == other.infer(PROMPT).text
        assert [*other.stream(PROMPT)]
        monkeypatch.delenv("CANVASRT_API_KEY")
        with pytest.raises(CanvasError, match="did not provide an API key"):
            other.infer(PROMPT)


def test_a_refused_request_does_not_end_its_stream(keyed: Serving):
    replies: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    head = {"authorization": "Bearer open"}
    with grpc.InferenceServerClient(keyed.said["grpc"]) as client:
        client.start_stream(lambda result, error: replies.put((result, error)), headers=head)
        for outputs in (None, CLASSIFIED, None):
            client.async_stream_infer("canvasrt_stream", prompt(), outputs=outputs)
            event = b""
            while event != b"final":
                result, error = replies.get(timeout=60)
                assert (error is None) == (outputs is None), error
                event = b"final" if error else result.as_numpy("event")[0]


def test_a_key_s_answers_count_on_all_ports(keyed: Serving):
    """Answers on Triton's ports count toward the limit of the key, too."""
    head = {**JSON, "Authorization": "Bearer sesame"}
    waiting = http.client.HTTPConnection(keyed.said["http"], timeout=60)
    with contextlib.closing(waiting):
        waiting.request("POST", GENERATE, json.dumps({**PROMPT, **ENDLESS}), head)
        assert eventually(lambda: chat(keyed.host, key="sesame").status == 429)
        assert triton(keyed, GENERATE, PROMPT, "sesame")[0] == 429
        with pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"):
            over_grpc(keyed, "sesame")
        assert triton(keyed, GENERATE, PROMPT, "open")[0] == 200
    assert eventually(lambda: triton(keyed, GENERATE, PROMPT, "sesame")[0] == 200)


@pytest.mark.parametrize("path", [GENERATE, "/v2/models/canvasrt_stream/generate_stream"])
@pytest.mark.parametrize("begun", [True, False])
def test_the_model_stops_for_callers_who_have_left(keyed: Serving, path: str, begun: bool):
    """Triton alone would continue their requests, which would fill the queue."""

    def running() -> int:
        page = httpx.get(keyed.said["metrics"]).text
        found = re.search(r"^canvasrt_requests_in_flight (\S+)", page, re.M)
        return int(float(found[1])) if found else -1

    left = http.client.HTTPConnection(keyed.said["http"], timeout=60)
    with contextlib.closing(left):
        head = {**JSON, "Authorization": "Bearer sesame"}
        named = {OWNER: "0123456789abcdef/1"}  # must be ignored
        left.request("POST", path, json.dumps({**PROMPT, **ENDLESS, **named}), head)
        assert not begun or eventually(lambda: running() == 1)
    assert eventually(lambda: triton(keyed, GENERATE, PROMPT, "sesame")[0] == 200)
    assert eventually(lambda: running() == 0)


@pytest.mark.parametrize("method", ["post", "PUT", "TRACE"])
def test_methods_that_triton_lacks_are_refused(keyed: Serving, method: str):
    connection = http.client.HTTPConnection(keyed.said["http"], timeout=60)
    with contextlib.closing(connection):
        connection.request(method, GENERATE, json.dumps(PROMPT), JSON)
        assert connection.getresponse().status == 405
