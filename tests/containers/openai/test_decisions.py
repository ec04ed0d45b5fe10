"""Closed questions over every protocol with real clients: probabilities equal those computed in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import openai as sdk
import pytest
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate
from openai import OpenAI

from canvasrt.bundle import Bundle
from canvasrt.cli.app import run
from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.decision import DecisionResult
from canvasrt.runtime.answers.layout import Ask
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.serving import needs_triton

pytestmark = needs_triton

STATE = "the train is late"
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": "Is it late?", "name": "late"},
    {
        "type": "choice",
        "instructions": "What is it?",
        "choices": [{"value": "train", "description": "on rails"}, {"value": "bus"}],
    },
    {
        "type": "score",
        "instructions": [{"type": "input_text", "text": "How bad?"}],
        "levels": [{"label": "fine"}, {"label": "bad"}, {"label": "very bad"}],
    },
]


@pytest.fixture(scope="module")
def expected(engines: Bundle) -> list[dict[str, Any]]:
    """Return the answers, computed in this process with seed 7 and two draws."""
    model, tokenizer = open_model(engines.path, threads=1), Tokenizer.load(engines)
    ask = Ask.from_json({"questions": QUESTIONS, "samples": 2})
    request = ask.request([{"role": "user", "content": STATE}], model, tokenizer, 7)
    (result,) = Generator(model).run([request])
    assert isinstance(result, DecisionResult)
    return ask.answers(result.draws)


def test_openai_client(openai: OpenAI, expected: list[dict[str, Any]]) -> None:
    for _ in range(2):  # repeating a request gives the same probabilities
        reply = openai.decisions.create(
            model="canvasrt",
            input=STATE,
            questions=QUESTIONS,
            extra_body={"seed": 7, "samples": 2},
        )
        assert [answer.to_dict() for answer in reply.answers] == expected
    predicate, choice, score = reply.answers
    assert predicate.type == "predicate"
    assert predicate.name == "late"
    assert choice.type == "choice"
    assert choice.choice in ("train", "bus")
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1)
    assert score.type == "score"
    assert score.score == pytest.approx(sum(p.value * p.probability for p in score.probabilities))
    assert [p.label for p in score.probabilities] == ["fine", "bad", "very bad"]
    assert reply.usage.input_tokens > len(STATE)
    assert reply.usage.output_tokens == 0
    odd = {"seed": 7, "odd": 1}
    reply = openai.decisions.create(
        model="canvasrt", input="a", questions=QUESTIONS, extra_body=odd
    )
    own = reply.to_dict()["canvasrt"]
    assert own == {"seed": 7, "warnings": ["Unknown parameter: 'odd'."], "passes": own["passes"]}


def test_messages_and_tool_calls_are_read(openai: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": 1}}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "late"},
    ]
    one = openai.decisions.create(model="canvasrt", input=messages, questions=QUESTIONS[:1])
    other = openai.decisions.create(model="canvasrt", input=messages[:2], questions=QUESTIONS[:1])
    assert one.answers != other.answers


def test_langchain(front: FrontEnd, openai: OpenAI) -> None:
    model = OpenAIDecisions(model="canvasrt", base_url=front.url, api_key="none")
    asked: Any = {
        "late": Predicate(instructions="Is it late?"),
        "what": Choice(instructions="What is it?", choices={"train": "on rails", "bus": None}),
    }
    reply = model.invoke({"input": STATE, "questions": asked})
    one = openai.decisions.create(model="canvasrt", input=STATE, questions=QUESTIONS[:2])
    late, what = one.answers
    assert late.type == "predicate"
    assert reply.predicates["late"].probability == late.probability
    assert what.type == "choice"
    assert reply.choices["what"].choice == what.choice


def test_systemone(front: FrontEnd, expected: list[dict[str, Any]]) -> None:
    questions = {
        "late": {"type": "noul", "instructions": "Is it late?"},
        "what": {
            "type": "choice",
            "instructions": "What is it?",
            "criteria": {"train": "on rails", "bus": None},
        },
        "bad": {
            "type": "score",
            "instructions": "How bad?",
            "criteria": ["fine", "bad", "very bad"],
        },
    }
    body = {"model": "canvasrt", "state": STATE, "questions": questions, "seed": 7, "samples": 2}
    body["odd"] = 1
    reply = httpx2.post(f"{front.url}/systemone", json=body, timeout=60).json()
    assert reply["canvasrt"] == {"seed": 7, "warnings": ["Unknown parameter: 'odd'."]}
    late, what, bad = (reply["answers"][name] for name in questions)
    assert late == {"type": "noul", "noul": expected[0]["probability"]}
    assert what["choice"] == expected[1]["choice"]
    shares = [each["probability"] for each in expected[1]["probabilities"]]
    assert what["probabilities"] == dict(zip(("train", "bus"), shares, strict=True))
    assert what["confidence"] == pytest.approx(2 * max(shares) - 1)
    assert bad["legend"] == {"0": "fine", "1": "bad", "2": "very bad"}
    assert bad["score"] == expected[2]["score"]


def test_triton(http: Client, grpc: Client, expected: list[dict[str, Any]]) -> None:
    inputs = {
        "prompt": STATE,
        "seed": 7,
        "questions": json.dumps({"questions": QUESTIONS, "samples": 2}),
    }
    for client in (http, grpc):
        answer = client.infer(inputs)
        assert json.loads(answer.text)["answers"] == expected
        assert answer.steps == [2]
    (event,) = grpc.stream(inputs)
    assert json.loads(event.text)["answers"] == expected
    with pytest.raises(CanvasError, match=r"questions\[0\]\.type is 'x'"):
        http.infer({"prompt": STATE, "questions": '[{"type": "x"}]'})


def choice(*values: Any) -> dict[str, Any]:
    return {"type": "choice", "instructions": "?", "choices": [{"value": each} for each in values]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"questions": []}, "questions", "1 to 400"),
    ({"questions": [QUESTIONS[0]] * 401}, "questions", "at most 400"),
    ({"questions": [{"type": "essay"}]}, "questions[0].type", "predicate, choice, score"),
    ({"questions": [QUESTIONS[0], choice("a")]}, "questions[1].choices", "2 to 255"),
    ({"questions": [choice("é", "ü")]}, "questions[0].choices[1]", "same tokens"),
    ({"questions": [choice("a", True, "true")]}, "questions[0].choices[2]", "same tokens"),
    ({"questions": [choice("a", 3)]}, "questions[0].choices[1].value", "some text"),
    ({"questions": [choice("a", "b") | {"levels": []}]}, "questions[0].levels", "unknown"),
    (
        {"questions": [choice("a" * 40, "b")], "layout": "bare"},
        "questions[0].choices",
        "a canvas has 32",
    ),
    ({"samples": 0}, "samples", "1 to 64"),
    ({"steps": 1000}, "steps", "1 to 48"),
    ({"layout": "x"}, "layout", "letters, bare"),
    ({"temperatures": {"choice": 0}}, "temperatures.choice", "0.01 to 100"),
    ({"temperatures": {"essay": 1.0}}, "temperatures.essay", "predicate, choice, score"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_bad_input_is_named(
    openai: OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "canvasrt", "input": STATE, "questions": QUESTIONS[:1], **fields}
    with pytest.raises(sdk.BadRequestError) as error:
        openai.post("/decisions", body=body, cast_to=object)
    assert error.value.body["param"] == param  # type: ignore[index]
    assert message in str(error.value)


def test_systemone_names_its_own_questions(front: FrontEnd) -> None:
    question = {"type": "score", "instructions": "?", "criteria": ["a", "a"]}
    body = {"model": "canvasrt", "state": STATE, "questions": {"mine": question}}
    reply = httpx2.post(f"{front.url}/systemone", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (
        400,
        "questions.mine.criteria[1]",
    )


def test_our_own_client_posts_decisions(front: FrontEnd, expected: list[dict[str, Any]]) -> None:
    client = OpenAIClient(front.url)
    body = {"model": client.model, "input": STATE, "questions": QUESTIONS, "seed": 7, "samples": 2}
    assert client.post("decisions", body)["answers"] == expected


def test_the_command_line_asks_a_server(
    front: FrontEnd,
    expected: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "questions.json"
    file.write_text(json.dumps({"questions": QUESTIONS, "samples": 2}))
    assert run(["ask", front.url, str(file), STATE, "--seed", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"] == expected
