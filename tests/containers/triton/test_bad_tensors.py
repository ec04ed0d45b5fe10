"""Bad tensors get an error reply, and the server keeps running."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.server import Server
from tests.helpers.serving import needs_triton

pytestmark = needs_triton


def text(*values: str | bytes) -> np.ndarray:
    return np.array([v.encode() if isinstance(v, str) else v for v in values], object)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


GOOD = text("12+34=")
TRUE = np.array([True])
QUESTIONS = text('[{"type": "predicate", "instructions": "?"}]')
TOO_DEEP = text("[" * 100_000)
# Inputs, and texts that the error reply must contain.
CASES: dict[str, tuple[dict[str, np.ndarray], tuple[str, ...]]] = {
    "no prompt": ({"seed": np.array([1], np.uint64)}, ("no prompt", "prompt_ids")),
    "two prompts": ({"prompt": GOOD, "prompt_ids": ints(3)}, ("prompt and prompt_ids",)),
    "blank prompt": ({"prompt": text("  \n")}, ("the prompt is empty",)),
    "not UTF-8": ({"prompt": text(b"ab\xff")}, ("not UTF-8", "byte 2")),
    "two rows": ({"prompt": text("a", "b")}, ("prompt", "[2]", "[1]")),
    "two dimensions": ({"prompt": GOOD.reshape(1, 1)}, ("prompt", "[1,1]", "[1]")),
    "no element": ({"prompt": text()}, ("prompt",)),
    "wrong type": ({"prompt": ints(1)}, ("prompt", "INT32", "STRING")),
    "an unknown tensor": ({"prompt": GOOD, "warmth": ints(1)}, ("warmth",)),
    "no strings in stop": ({"prompt_ids": ints(112), "stop": text()}, ("112",)),
    "no token ids": ({"prompt_ids": ints()}, ("empty",)),
    "negative token id": ({"prompt_ids": ints(3, -1)}, ("-1", "0 to 111")),
    "negative token id to echo": ({"prompt_ids": ints(-1), "echo": TRUE}, ("-1",)),
    "token id too large": ({"prompt_ids": ints(112)}, ("112", "0 to 111")),
    "prompt too long": ({"prompt": text("x" * 9000)}, ("9016 tokens", "4096", "shorten")),
    "too many tokens": ({"prompt": GOOD, "max_new_tokens": ints(2**31 - 1)}, ("2147483647",)),
    "beyond the context": (
        {"prompt_ids": ints(*[5] * 100), "max_new_tokens": ints(4096)},
        ("100 tokens", "at most 3968"),
    ),
    "t_min above t_max": (
        {"prompt": GOOD, "t_min": np.array([0.9], np.float32)},
        ("t_max 0.8", "t_min 0.9"),
    ),
    "a bias of no token": ({"prompt": GOOD, "logit_bias": text('{"x": 1}')}, ("not a token id",)),
    "a bias that is no number": (
        {"prompt": GOOD, "logit_bias": text('{"17": true}')},
        ("logit_bias of token 17 is True",),
    ),
    "two biases of a token": (
        {"prompt": GOOD, "logit_bias": text('{"17": 1, "017": 2}')},
        ("logit_bias of token 17 is given twice",),
    ),
    "a bias beyond floats": (
        {"prompt": GOOD, "logit_bias": text('{"17": 1%s}' % ("0" * 400))},
        ("logit_bias of token 17 is inf",),
    ),
    "not JSON": ({"messages": text("{nope")}, ("not JSON", "character 1")),
    "no messages": ({"messages": text("[]")}, ("not a list of messages",)),
    "no role": ({"messages": text('[{"content": "a"}]')}, ("message 0 has no role",)),
    "no content": ({"messages": text('[{"role": "user"}]')}, ("message 0 has no content",)),
    "gaps with a grammar": (
        {"prompt": GOOD, "infill": text("{2}"), "grammar": text("{}")},
        ("grammar has no effect with infill",),
    ),
    "gaps with log-probabilities": (
        {"prompt": GOOD, "infill": text("{2}"), "logprobs": TRUE},
        ("logprobs is not supported together with gaps to fill",),
    ),
}
CASES |= {
    f"too deep in {name}": (
        {"messages": text('[{"role": "user", "content": "a"}]')} | {name: TOO_DEEP}
        if name in ("messages", "template")
        else {"prompt": GOOD, name: TOO_DEEP},
        (f"{name} is not JSON: it is nested more than 100 deep",),
    )
    for name in (
        *("messages", "template", "questions", "grammar", "logit_bias", "canvas", "tokenize"),
    )
}
CASES |= {
    f"questions with {name}": (
        {"prompt": GOOD, "questions": QUESTIONS, name: text("{}")},
        (f"{name} has no effect with questions",),
    )
    for name in ("infill", "grammar", "template", "prefix")
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_tensor_gets_an_error_reply(name: str, server: Server):
    inputs, says = CASES[name]
    for ask in (_over_http, _over_grpc, _as_a_stream):
        message = str(ask(server, inputs))
        for part in says:
            assert part in message.replace("TYPE_", "").replace("BYTES", "STRING"), ask


def test_after_all_of_them_the_server_answers(http: Client, grpc: Client):
    for client in (http, grpc):
        assert len(client.infer({"prompt": "12+34=", "max_new_tokens": 3}).token_ids) == 3


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"max_tokens": 5}, "unknown input 'max_tokens'"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ],
)
def test_the_generate_endpoint_refuses(server: Server, field: dict[str, Any], says: str):
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/canvasrt/generate"
    body = json.dumps({"prompt": "12+34=", **field}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, data=body, timeout=30)
    assert refused.value.code == 400
    assert says in json.loads(refused.value.read())["error"]


def test_a_bad_request_is_the_callers_fault_in_the_status(server: Server):
    assert _over_http(server, {"prompt": text("")}).status() == "400"
    assert _over_grpc(server, {"prompt": text("")}).status() == "StatusCode.INVALID_ARGUMENT"


def _inputs(module: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
    made = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _refusal(module: Any, port: int, arrays: dict[str, np.ndarray]) -> InferenceServerException:
    with (
        module.InferenceServerClient(f"127.0.0.1:{port}") as client,
        pytest.raises(InferenceServerException) as refused,
    ):
        client.infer("canvasrt", _inputs(module, arrays))
    return refused.value


def _over_http(server: Server, arrays: dict[str, np.ndarray]) -> InferenceServerException:
    return _refusal(tritonclient.http, server.ports.http, arrays)


def _over_grpc(server: Server, arrays: dict[str, np.ndarray]) -> InferenceServerException:
    return _refusal(tritonclient.grpc, server.ports.grpc, arrays)


def _as_a_stream(server: Server, arrays: dict[str, np.ndarray]) -> InferenceServerException:
    replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
    url = f"127.0.0.1:{server.ports.grpc}"
    with tritonclient.grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: replies.put(error or result))
        client.async_stream_infer("canvasrt_stream", _inputs(tritonclient.grpc, arrays))
        reply = replies.get(timeout=30)
    assert isinstance(reply, InferenceServerException)
    return reply
