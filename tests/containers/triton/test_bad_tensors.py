"""Bad tensors get an error reply, and the server keeps running."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
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


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


GOOD = text("12+34=")


@dataclass(frozen=True)
class Bad:
    """Inputs, and what the error reply must say about them."""

    name: str
    inputs: dict[str, np.ndarray]
    says: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


CASES = (
    Bad("no prompt", {"seed": np.array([1], np.uint64)}, ("no prompt", "prompt_ids")),
    Bad("two prompts", {"prompt": GOOD, "prompt_ids": ints(3)}, ("prompt and prompt_ids",)),
    Bad("empty prompt", {"prompt": text("")}, ("the prompt is empty",)),
    Bad("blank prompt", {"prompt": text("  \n")}, ("the prompt is empty",)),
    Bad("not UTF-8", {"prompt": text(b"ab\xff")}, ("not UTF-8", "byte 2")),
    Bad("two rows", {"prompt": text("a", "b")}, ("prompt", "[2]", "[1]")),
    Bad("two dimensions", {"prompt": GOOD.reshape(1, 1)}, ("prompt", "[1,1]", "[1]")),
    Bad("no element", {"prompt": text()}, ("prompt",)),
    Bad("wrong type of text", {"prompt": ints(1)}, ("prompt", "INT32", "STRING")),
    Bad("no strings in stop", {"prompt_ids": ints(112), "stop": text()}, ("112",)),
    Bad("no token ids", {"prompt_ids": ints()}, ("empty",)),
    Bad("negative token id", {"prompt_ids": ints(3, -1)}, ("-1", "0 to 111")),
    Bad("negative token id to echo", {"prompt_ids": ints(-1), "echo": np.array([True])}, ("-1",)),
    Bad(
        "a bias beyond floats",
        {"prompt": GOOD, "logit_bias": text('{"17": 1%s}' % ("0" * 400))},
        ("logit_bias of token 17 is inf",),
    ),
    Bad("token id too large", {"prompt_ids": ints(112)}, ("112", "0 to 111")),
    Bad("token ids of 64 bits", {"prompt_ids": np.array([3])}, ("prompt_ids", "INT64", "INT32")),
    Bad("prompt too long", {"prompt": text("x" * 9000)}, ("9016 tokens", "4096", "shorten")),
    Bad("not JSON", {"messages": text("{nope")}, ("not JSON", "character 1")),
    *(
        Bad(
            f"too deep in {name}",
            {**inputs, name: text("[" * 100_000)},
            (f"{name} is not JSON: it is nested more than 100 deep",),
        )
        for name, inputs in (
            ("messages", {}),
            ("template", {"messages": text('[{"role": "user", "content": "a"}]')}),
            ("questions", {"prompt": GOOD}),
            ("grammar", {"prompt": GOOD}),
            ("logit_bias", {"prompt": GOOD}),
            ("canvas", {"prompt": GOOD}),
            ("tokenize", {"prompt": GOOD}),
        )
    ),
    *(
        Bad(
            f"questions with {name}",
            {"prompt": GOOD, "questions": text('[{"type": "predicate", "instructions": "?"}]')}
            | {name: text(value)},
            (f"{name} has no effect with questions",),
        )
        for name, value in (
            ("infill", "{2}"),
            ("grammar", "{}"),
            ("template", "{}"),
            ("prefix", "a"),
        )
    ),
    Bad(
        "gaps with a grammar",
        {"prompt": GOOD, "infill": text("{2}"), "grammar": text("{}")},
        ("grammar has no effect with infill",),
    ),
    Bad(
        "gaps with log-probabilities",
        {"prompt": GOOD, "infill": text("{2}"), "logprobs": np.array([True])},
        ("logprobs is not supported together with gaps to fill",),
    ),
    Bad("no messages", {"messages": text("[]")}, ("not a list of messages",)),
    Bad("no role", {"messages": text('[{"content": "a"}]')}, ("message 0 has no role",)),
    Bad("no content", {"messages": text('[{"role": "user"}]')}, ("message 0 has no content",)),
    Bad("no new tokens", {"prompt": GOOD, "max_new_tokens": ints(0)}, ("max_new_tokens is 0",)),
    Bad("negative tokens", {"prompt": GOOD, "max_new_tokens": ints(-5)}, ("max_new_tokens is -5",)),
    Bad("too many tokens", {"prompt": GOOD, "max_new_tokens": ints(2**31 - 1)}, ("2147483647",)),
    Bad(
        "beyond the context",
        {"prompt_ids": ints(*[5] * 100), "max_new_tokens": ints(4096)},
        ("100 tokens", "at most 3968"),
    ),
    Bad(
        "no steps", {"prompt": GOOD, "max_denoising_steps": ints(0)}, ("max_denoising_steps is 0",)
    ),
    Bad("too many steps", {"prompt": GOOD, "max_denoising_steps": ints(10**6)}, ("10000",)),
    Bad("a bound of nan", {"prompt": GOOD, "entropy_bound": floats(np.nan)}, ("nan", "finite")),
    Bad("an infinite t_max", {"prompt": GOOD, "t_max": floats(np.inf)}, ("t_max is inf",)),
    Bad("t_min above t_max", {"prompt": GOOD, "t_min": floats(0.9)}, ("t_max 0.8", "t_min 0.9")),
    Bad("a negative t_min", {"prompt": GOOD, "t_min": floats(-0.1)}, ("t_min is -0.1",)),
    Bad("two seeds", {"prompt": GOOD, "seed": np.array([1, 2], np.uint64)}, ("seed", "[2]", "[1]")),
    Bad("a signed seed", {"prompt": GOOD, "seed": np.array([-1])}, ("seed", "INT64", "UINT64")),
    Bad("an unknown tensor", {"prompt": GOOD, "warmth": floats(1)}, ("warmth",)),
)


@pytest.mark.parametrize("bad", CASES, ids=str)
def test_a_bad_tensor_gets_an_error_reply(bad: Bad, server: Server):
    for ask in (_over_http, _over_grpc, _as_a_stream):
        message = str(ask(server, bad.inputs))
        for part in bad.says:
            assert part in message.replace("TYPE_", "").replace("BYTES", "STRING"), ask


def test_after_all_of_them_the_server_answers(http: Client, grpc: Client):
    for client in (http, grpc):
        assert len(client.infer({"prompt": "12+34=", "max_new_tokens": 3}).token_ids) == 3


@pytest.mark.parametrize(
    ("field", "says", "status"),
    [
        ({"max_tokens": 5}, "unknown input 'max_tokens'", 400),
        ({"max_new_tokens": -1}, "max_new_tokens is -1", 400),
        # What Triton's own front end cannot parse, it answers with 500.
        ({"max_new_tokens": "many"}, "non-signed-integer", 500),
        ({"seed": -1}, "non-unsigned-integer", 500),
        ({"prompt": 3}, "non-string", 500),
    ],
)
def test_the_generate_endpoint_refuses(
    server: Server, field: dict[str, Any], says: str, status: int
):
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/canvasrt/generate"
    body = json.dumps({"prompt": "12+34=", **field}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, data=body, timeout=30)
    assert refused.value.code == status
    assert says in json.loads(refused.value.read())["error"]


def test_a_bad_request_is_the_callers_fault_in_the_status(server: Server):
    error = _over_http(server, {"prompt": text("")})
    assert error.status() == "400"
    error = _over_grpc(server, {"prompt": text("")})
    assert error.status() == "StatusCode.INVALID_ARGUMENT"


def _inputs(module: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
    made = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _over_http(server: Server, arrays: dict[str, np.ndarray]) -> InferenceServerException:
    url = f"127.0.0.1:{server.ports.http}"
    with (
        tritonclient.http.InferenceServerClient(url) as client,
        pytest.raises(InferenceServerException) as refused,
    ):
        client.infer("canvasrt", _inputs(tritonclient.http, arrays))
    return refused.value


def _over_grpc(server: Server, arrays: dict[str, np.ndarray]) -> InferenceServerException:
    url = f"127.0.0.1:{server.ports.grpc}"
    with (
        tritonclient.grpc.InferenceServerClient(url) as client,
        pytest.raises(InferenceServerException) as refused,
    ):
        client.infer("canvasrt", _inputs(tritonclient.grpc, arrays), client_timeout=30)
    return refused.value


def _as_a_stream(server: Server, arrays: dict[str, np.ndarray]) -> InferenceServerException:
    import queue

    replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
    url = f"127.0.0.1:{server.ports.grpc}"
    with tritonclient.grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: replies.put(error or result))
        client.async_stream_infer("canvasrt_stream", _inputs(tritonclient.grpc, arrays))
        reply = replies.get(timeout=30)
    assert isinstance(reply, InferenceServerException)
    return reply
