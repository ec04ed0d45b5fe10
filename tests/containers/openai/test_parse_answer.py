"""Answers are parsed as transformers does, however the text is divided into pieces."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing.response_parser import parse_response

from canvasrt.containers.openai.parse_answer import AnswerParser, Piece, ToolCall, text_of
from canvasrt.containers.openai.tool_arguments import CallError, read_arguments

GEMMA = _RESPONSE_TEMPLATE_FALLBACKS[("gemma4",)]
ANSWERS = {
    "plain": "It is 12 < 13.",
    "no thought": "<|channel>thought\n<channel|>Hello",
    "an empty thought": "<|channel>thought\n\n<channel|>Hello",
    "a thought": "<|channel>thought\nI add\nthem.\n<channel|>\nIt is 3.",
    "only a thought": "<|channel>thought\nI never",
    "a call": '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    "no arguments": "<|tool_call>call:now{}<tool_call|>",
    "every type": '<|tool_call>call:f{a:<|"|>x, {y}: "z"<|"|>,b:1.5,c:-2,d:true,e:null,'
    'g:[1,<|"|>a<|"|>,[]],h:{i:<|"|><|"|>,j:{k:false}}}<tool_call|>',
    "two calls": "<|tool_call>call:a{}<tool_call|><|tool_call>call:b{x:1}<tool_call|>",
    "all of it": "<|channel>thought\nhm\n<channel|>Let me see.\n"
    '<|tool_call>call:a{q:<|"|>C:\\tmp\n"é" 漢<|"|>}<tool_call|>',
}


class Answer(NamedTuple):
    """A whole parsed answer."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


def joined(pieces: list[Piece]) -> Answer:
    calls = tuple(piece.call for piece in pieces if piece.call is not None)
    return Answer(text_of(pieces, "content"), text_of(pieces, "reasoning"), calls)


def parsed(text: str, tools: Any = None, **options: Any) -> Answer:
    return joined(AnswerParser(tools, **options).put(text, final=True))


def flat(answer: Answer) -> dict[str, Any]:
    """Return an answer in the reference's form, which has no empty fields and no spaces at the end."""
    calls = [
        {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in answer.calls
    ]
    found = {"content": answer.content.strip(), "reasoning_content": answer.reasoning}
    return {k: v for k, v in (found | {"tool_calls": calls}).items() if v}


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_the_reference_agrees(text: str) -> None:
    expected = parse_response(text, GEMMA, prefix="")
    expected.pop("role")
    assert flat(parsed(text, {})) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("text", [*ANSWERS.values(), "<|channel>thought <so>\n<channel|>Hello"])
def test_pieces_add_up(text: str, size: int) -> None:
    whole, parser = parsed(text, {}), AnswerParser({})
    pieces = [each for at in range(0, len(text), size) for each in parser.put(text[at : at + size])]
    cut = joined(pieces + parser.put("", final=True))
    assert (cut.content, cut.reasoning) == (whole.content, whole.reasoning)
    calls = [(p.index, p.call.name, p.call.arguments) for p in pieces if p.call]
    assert calls[: len(whole.calls)] == [
        (n, c.name, c.arguments) for n, c in enumerate(whole.calls)
    ]


def test_a_caller_without_tools_gets_text_as_it_is() -> None:
    for text in ("  spaces \n", "a < b <| c", "\n"):
        assert parsed(text) == Answer(text, "", ())


def test_calls_that_nobody_asked_for_are_text() -> None:
    text = 'Well: <|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>'
    assert parsed(text) == Answer('Well:call:f{a:"b"}', "", ())


def test_a_call_that_was_cut_short_is_dropped() -> None:
    for text in ("Well. <|tool_call>call:f{a:1", '<|tool_call>call:f{a:<|"|>x', "<|tool_call>"):
        answer = parsed(text, {"f": {}})
        assert not answer.calls
        assert "call" not in answer.content


def test_a_call_that_only_lacks_its_end_counts() -> None:
    answer = parsed("<|tool_call>call:f{a:1}", {"f": {}})
    assert [each.arguments for each in answer.calls] == ['{"a": 1}']


def test_what_cannot_be_read_as_a_call_is_text() -> None:
    answer = parsed("<|tool_call>call:f(1, 2)<tool_call|>", {"f": {}})
    assert answer == Answer("call:f(1, 2)", "", ())


def test_without_parallel_calls_only_the_first_counts() -> None:
    answer = parsed(ANSWERS["two calls"], {}, parallel=False)
    assert [each.name for each in answer.calls] == ["a"]


def test_ids_differ() -> None:
    first, second = parsed(ANSWERS["two calls"], {}).calls
    assert first.id != second.id
    assert first.id.startswith("call_")


# Variants of the call syntax that users of other servers have seen the model write.
DRIFT = {
    "{a:'x',b:\"y\"}": {"a": "x", "b": "y"},
    '{"a": "x", "b": [\'y\', "z"]}': {"a": "x", "b": ["y", "z"]},
    "{save_as='report.docx',n=2}": {"save_as": "report.docx", "n": 2},
    "{city:Paris,unit:celsius}": {"city": "Paris", "unit": "celsius"},
    "{tags:[bug,ui]}": {"tags": ["bug", "ui"]},
    "{a:it's,b:1}": {"a": "it's", "b": 1},
    '{a:"x, {y}",b:2}': {"a": "x, {y}", "b": 2},
    "{big:1e999,zip:007,none:None}": {"big": "1e999", "zip": "007", "none": None},
    '{ a : <|"|>x<|"|> ,\n b : [ 1 , 2 ] }': {"a": "x", "b": [1, 2]},
    "{a:1,}": {"a": 1},
    "{a:,b:1}": {"a": "", "b": 1},
}


@pytest.mark.parametrize(("text", "meant"), DRIFT.items(), ids=DRIFT)
def test_drift_is_read_as_what_it_means(text: str, meant: dict[str, Any]) -> None:
    assert read_arguments(text) == meant
    json.loads(json.dumps(meant), parse_constant=pytest.fail)


def test_the_schema_decides_what_a_bare_word_is() -> None:
    schema = {
        "properties": {
            "zip": {"type": "string"},
            "deep": {"properties": {"zips": {"items": {"type": "string"}}}},
        }
    }
    text = "{zip:01234,other:12,deep:{zips:[5,true]}}"
    expected = {"zip": "01234", "other": 12, "deep": {"zips": ["5", "true"]}}
    assert read_arguments(text, schema) == expected


@pytest.mark.parametrize(
    "text", ["", "{", "a:1", "{a:1}}", "{a:[1}", "{:1}", '{a:<|"|>x}', "{1", "{" + "a:{" * 100]
)
def test_what_is_no_object_is_an_error(text: str) -> None:
    with pytest.raises(CallError):
        read_arguments(text)


def test_any_text_is_read_in_time_and_gives_json() -> None:
    """Random sequences of syntax elements are parsed quickly, and give JSON or an error."""
    import random

    parts = ["{", "}", "[", "]", ",", ":", "=", '"', "'", '<|"|>', "a", "1", "\\", " ", "true", "-"]
    rng = random.Random(7)
    read = 0
    for _ in range(5000):
        text = "{" + "".join(rng.choices(parts, k=rng.randrange(30))) + "}"
        try:
            json.loads(json.dumps(read_arguments(text)), parse_constant=pytest.fail)
            read += 1
        except CallError:
            continue
    assert 20 < read < 5000


def test_quotes_that_do_not_close_take_linear_time() -> None:
    begin = time.process_time()
    with pytest.raises(CallError):
        read_arguments("{" + "a:'b," * 40_000)
    assert time.process_time() - begin < 10  # quadratic time would be minutes
