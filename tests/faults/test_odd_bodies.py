"""Bodies that no real client sends, on every route with a body. The caller gets an error, and nobody else is
affected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.serving import needs_triton
from tests.helpers.serving_process import Serving, ask, call

pytestmark = needs_triton

CHAT = [{"role": "user", "content": "a"}]
PREDICATE = [{"type": "predicate", "instructions": "x"}]
DEEP = "[" * 100_000
# A long chain of rules, which are compiled recursively.
CHAIN = "start: a0\n" + "".join(f"a{n}:a{n + 1}\n" for n in range(1400)) + "a1400: NONE\n"
HALF = json.loads('"\\ud800"')  # half a surrogate pair


def called(text: Any) -> list[dict[str, Any]]:
    """Return a chat in which the model has called a tool with these arguments."""
    function = {"name": "f", "arguments": text}
    calls = [{"id": "a", "type": "function", "function": function}]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *CHAT]


def image(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]


ODD: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"messages": called(DEEP)},
        {"messages": called("9" * 5000)},
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": CHAT, "response_format": {"type": ["x"]}},
        {"messages": CHAT, "chat_template_kwargs": {"tools": 5, "messages": 1}},
        {"messages": CHAT, "logit_bias": {"²": 1}},
        {"messages": CHAT, "response_format": {"type": "regex", "regex": "a?" * 30_000}},
        {"messages": CHAT, "response_format": {"type": "grammar", "grammar": CHAIN[:60_000]}},
        {"messages": CHAT, "response_format": {"type": "grammar", "grammar": CHAIN}},
        {"messages": CHAT * 8193},
        {"messages": CHAT, "tools": [{"type": ["x"]}], "tool_choice": {"type": ["x"]}},
    ],
    "/v1/completions": [{"prompt": HALF}, {"prompt": [[], [10**30]]}, {"prompt": "a", "n": True}],
    "/v1/responses": [
        {"input": [{"type": ["x"]}]},
        {"input": [{"role": ["x"], "content": [{"type": ["a"]}]}]},
        {"input": "a", "text": {"format": {"type": ["x"]}}},
        {"input": CHAT * 8193},
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": DEEP}]},
    ],
    "/v1/decisions": [
        {"input": [{"role": ["a"]}], "questions": [1]},
        {"input": [{"type": ["a"]}], "questions": [1]},
        {"input": "a", "questions": [{"type": ["predicate"]}]},
        {"input": HALF, "questions": PREDICATE},
        {"input": image("data:image/png;base64,AAAA"), "questions": PREDICATE},
        {"input": "a", "questions": [{"type": "choice", "choices": [{"value": ["a"]}]}]},
    ],
    "/v1/systemone": [
        {"state": "a", "questions": {"a": {"type": ["noul"]}}},
        {"state": "a", "questions": {"a": {"type": "noul"}}, "temperatures": {"questions[99]": 1}},
        {
            "state": "a",
            "questions": {"a": {"type": "noul"}},
            "temperatures": {"questions[" + "9" * 5000 + "]": 1},
        },
        {"state": {"a": HALF}, "questions": {"a": {"type": "noul"}}},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": []}]},
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": {"a": 1}}]}
            ]
        },
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": CHAT, "tools": [{"type": ["x"]}], "tool_choice": {"type": ["x"]}},
    ],
    "/v1/infill": [
        {"text": "{0}"},
        {"text": "a {1-20000000}"},
        {"text": "a {3000000000}"},
        {"text": "{" + "9" * 5000 + "}"},
        {"text": "{1-9}" * 300},
        {"text": "a {2} b", "prompt": HALF},
    ],
    "/tokenize": [
        {"messages": CHAT, "chat_template_kwargs": {"messages": 1}},
        {"prompt": HALF},
        {"prompt": "x" * 2_000_000},
    ],
    "/detokenize": [{"tokens": [10**6]}, {"tokens": [-1]}, {"tokens": [[5]]}],
    "/api/chat": [
        {"messages": [{"role": "user", "content": "a", "images": 5}]},
        {"messages": [{"role": "user", "content": {"a": 1}, "images": ["x"]}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]},
        {"messages": [{"role": ["tool"], "content": "a"}]},
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": CHAT, "think": [1]},
        {"model": ["canvasrt"], "messages": CHAT},
    ],
    "/api/generate": [
        {"prompt": "a", "options": {"num_predict": "x"}},
        {"prompt": "a", "images": 5},
        {"prompt": 5, "raw": True},
        {"prompt": HALF},
    ],
}
RAW = (DEEP, '{"model": "canvasrt", "seed": ' + "9" * 5000 + "}", '"\\ud800"', "\xff", "", "NaN")


@pytest.mark.parametrize("path", ODD)
def test_what_makes_no_sense_is_the_callers_fault(running: Serving, path: str) -> None:
    bodies = [json.dumps({"model": "canvasrt", **fields}) for fields in ODD[path]]
    for body in (*bodies, *RAW):
        status, reply, _ = call(running.host, path, body.encode("latin-1"))
        assert status in (400, 404), (body[:200], status, reply)
    assert ask(running)[0] == 200
