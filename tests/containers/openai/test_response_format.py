"""`response_format` over the OpenAI API, with the real client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel

from canvasrt.containers.client.triton import Client
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
CHAT: Any = [{"role": "user", "content": "12+34="}]
FEW: Any = {"max_denoising_steps": 3}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}


def ask(openai: OpenAI, response_format: Any, **options: Any) -> Any:
    given = {"max_tokens": 64, "seed": 1, "extra_body": FEW} | options
    return openai.chat.completions.create(
        model="canvasrt", messages=CHAT, response_format=response_format, **given
    ).choices[0]


def test_a_json_schema(openai: OpenAI) -> None:
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True},
    }
    choice = ask(openai, wanted)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert ask(openai, wanted).message.content == choice.message.content
    short = ask(openai, wanted, max_tokens=4)
    assert (short.finish_reason, short.message.content) == ("length", "")


class Sum(BaseModel):
    sum: int
    right: bool


def test_a_pydantic_model(openai: OpenAI) -> None:
    reply = openai.chat.completions.parse(
        model="canvasrt", messages=CHAT, response_format=Sum, max_tokens=128, extra_body=FEW
    )
    assert isinstance(reply.choices[0].message.parsed, Sum)


def test_any_object_and_our_own_kinds(openai: OpenAI) -> None:
    assert isinstance(json.loads(ask(openai, {"type": "json_object"}).message.content), dict)
    choice = ask(openai, {"type": "regex", "regex": "(yes|no)[.]"})
    assert choice.message.content in ("yes.", "no.")
    lark = {"type": "grammar", "grammar": 'start: "a" ("b" | "c")'}
    assert ask(openai, lark).message.content in ("ab", "ac")
    stream = openai.chat.completions.create(
        model="canvasrt",
        messages=CHAT,
        response_format={"type": "regex", "regex": "(yes|no)[.]"},  # type: ignore[arg-type]
        stream=True,
        seed=1,
        max_tokens=64,
        extra_body=FEW,
    )
    text = "".join(each.choices[0].delta.content or "" for each in stream)
    assert text == choice.message.content


def test_over_triton(http: Client) -> None:
    spec = json.dumps({"type": "json_schema", "schema": SCHEMA})
    answer = http.infer({"prompt": "12+34=", "grammar": spec, "max_denoising_steps": 3})
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    with pytest.raises(Exception, match="grammar is not JSON"):
        http.infer({"prompt": "12+34=", "grammar": "{"})
