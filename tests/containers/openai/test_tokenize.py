"""`/tokenize` and `/detokenize` in vLLM's form, and tokenizing over Triton."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx2
import pytest

from canvasrt.containers.client.triton import Client
from canvasrt.containers.openai.endpoint import Run
from canvasrt.containers.openai.generation import Served
from canvasrt.containers.openai.tokenize import TOKENIZE, TokenizeRequest, tokenize
from canvasrt.containers.openai.upstream import triton_error
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
LONG, KWARGS = "1" * (2**22 + 1), "chat_template_kwargs"
CHAT = [{"role": "user", "content": "reverse planet"}, {"role": "assistant", "content": "tenalp"}]


def post(front: FrontEnd, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"http://127.0.0.1:{front.port}{path}", json=body, timeout=60)


def test_a_prompt(front: FrontEnd, tokenizer: Tokenizer) -> None:
    reply = post(front, "/tokenize", model="canvasrt", prompt="12+34=").json()
    ids = tokenizer.encode("12+34=")
    assert reply == {
        "count": len(ids),
        "max_model_len": None,
        "tokens": ids,
        "token_strs": None,
    }
    bare = post(
        front, "/tokenize", prompt="12+34=", add_special_tokens=False, return_token_strs=True
    ).json()
    assert bare["tokens"] == tokenizer.encode("12+34=", False)
    assert bare["token_strs"] == list("12+34=")


def test_messages(front: FrontEnd, tokenizer: Tokenizer) -> None:
    reply = post(front, "/tokenize", messages=CHAT[:1]).json()
    assert reply["tokens"] == tokenizer.encode_chat(CHAT[:1])
    closed = post(front, "/tokenize", messages=CHAT, add_generation_prompt=False).json()
    text = tokenizer.render_chat(CHAT, add_generation_prompt=False)
    assert closed["tokens"] == tokenizer.encode(text, False)
    assert closed["count"] < post(front, "/tokenize", messages=CHAT).json()["count"]


def test_back_to_text(front: FrontEnd, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(CHAT[:1])
    assert post(front, "/detokenize", tokens=ids).json() == {"prompt": tokenizer.decode(ids, False)}
    assert post(front, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_prompt_beyond_the_context_is_counted(front: FrontEnd) -> None:
    assert post(front, "/tokenize", prompt="1" * 9000).json()["count"] >= 9000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"x": 1}}, f"{KWARGS}.x"),
        ("/detokenize", {"tokens": [112]}, "tokens"),
    ],
    ids=["text", "chat", "variable", "token"],
)
def test_what_the_model_refuses_is_named(
    front: FrontEnd, path: str, body: dict, param: str
) -> None:
    reply = post(front, path, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_what_the_template_refuses_is_in_the_messages() -> None:
    body, none = TokenizeRequest(messages=CHAT), cast(Any, None)
    run = Run(TOKENIZE, body, tokenize(body), [], Served(), none, none, {})
    said = triton_error("INVALID_ARG", "the chat template refused the messages: no")
    assert run._renamed(said).param == "messages"


@pytest.mark.parametrize("name", ["http", "grpc"])
def test_over_triton(name: str, request: pytest.FixtureRequest, tokenizer: Tokenizer) -> None:
    client: Client = request.getfixturevalue(name)
    ids = tokenizer.encode_chat(CHAT[:1])
    answer = client.infer({"messages": json.dumps(CHAT[:1]), "tokenize": '{"spell": true}'})
    assert answer.prompt_token_ids == ids
    assert answer.token_ids == []
    found = json.loads(answer.text)
    assert found["text"] == tokenizer.decode(ids, False)
    assert "".join(found["tokens"][-20:]).endswith(found["text"][-5:])
    back = client.infer({"prompt_ids": ids, "tokenize": "{}"})
    assert json.loads(back.text)["text"] == found["text"]
