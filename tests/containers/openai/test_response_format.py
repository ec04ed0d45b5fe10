"""`response_format` over the OpenAI API with the real client, and grammars over Triton."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from canvasrt.containers.client.triton import Client
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
FEW: Any = {"max_denoising_steps": 3}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
REGEX = {"type": "regex", "regex": "(yes|no)[.]"}


def ask(openai: OpenAI, form: Any, **options: Any) -> Any:
    given: Any = {"max_tokens": 64, "seed": 1, "extra_body": FEW, "response_format": form} | options
    messages = [{"role": "user", "content": "12+34="}]
    return openai.chat.completions.create(model="canvasrt", messages=messages, **given)


def test_a_json_schema(openai: OpenAI, http: Client) -> None:
    form = {"name": "sum", "schema": SCHEMA, "strict": True}
    wanted = {"type": "json_schema", "json_schema": form}
    (choice,) = ask(openai, wanted).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    (short,) = ask(openai, wanted, max_tokens=4).choices
    assert (short.finish_reason, short.message.content) == ("length", "")
    spec = json.dumps({"type": "json_schema", "schema": SCHEMA})
    asked = {"prompt": "12+34=", "grammar": spec, "seed": 1, "max_new_tokens": 64, **FEW}
    assert http.infer(asked).text == choice.message.content


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        (REGEX, {"yes.", "no."}),
        ({"type": "grammar", "grammar": 'start: "a" ("b" | "c")'}, {"ab", "ac"}),
    ],
)
def test_our_own_kinds(openai: OpenAI, form: Any, answers: set[str]) -> None:
    said = ask(openai, form).choices[0].message.content
    assert said in answers
    stream = ask(openai, form, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in stream) == said


def test_any_object(openai: OpenAI) -> None:
    (choice,) = ask(openai, {"type": "json_object"}).choices
    assert isinstance(json.loads(choice.message.content), dict)
