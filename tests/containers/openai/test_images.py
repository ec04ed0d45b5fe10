"""Images through the real server and clients, with the bundled checkpoint that has a vision tower: the tokens equal
those generated in process. test_refusals.py tests what the front end refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.cli.app import run
from canvasrt.containers.client.triton import Client
from canvasrt.demo import labelled
from canvasrt.demo.dots import COLORS
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.decision import DecisionResult
from canvasrt.runtime.answers.layout import Ask
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import insert, read_picture
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers import library
from tests.helpers.dots import FULL, SMALL, WHICH_COLOR, blank, pictures
from tests.helpers.pictures import noise, png
from tests.helpers.scripted import Served, client_of, serving
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
ONE, OTHER = noise(90, 70), noise(20, 99, 3)


class Sighted(NamedTuple):
    """A server of this checkpoint, its engines, and a client."""

    engines: Bundle
    served: Served
    client: OpenAI


@pytest.fixture(scope="module")
def sighted() -> Iterator[Sighted]:
    bundle = load_bundle(library.bundle("demo-vision"))
    with serving(bundle) as served, client_of(served) as client:
        yield Sighted(bundle, served, client)


def url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def part(image: Image.Image | bytes, **fields: Any) -> dict[str, Any]:
    file = image if isinstance(image, bytes) else png(image)
    return {"type": "image_url", "image_url": {"url": url(file), **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(sighted: Sighted, content: list[Any], **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    given: dict[str, Any] = {"max_tokens": 32, "seed": 3, "extra_body": more}
    return sighted.client.chat.completions.create(model="canvasrt", messages=messages, **given)


@pytest.mark.parametrize(
    "content",
    [[text("What is "), ONE, text("?")], [OTHER], [ONE, OTHER, text("Compare.")]],
    ids=["one", "only", "two"],
)
def test_tokens_are_those_of_this_process(sighted: Sighted, content: list[Any]) -> None:
    """Images are sent over the OpenAI API, and over Triton's protocols as bytes, in base64 and as data URLs."""
    model, tokenizer = open_model(sighted.engines.path, threads=1), Tokenizer.load(sighted.engines)
    images = [each for each in content if isinstance(each, Image.Image)]
    parts = [each if isinstance(each, dict) else {"type": "image"} for each in content]
    chat = [{"role": "user", "content": parts}]
    seen = [read_picture(png(each), model.config.vision or {}, SMALL) for each in images]
    prompt = insert(tokenizer.encode_chat(chat), seen, model.config)
    settings = {"seed": 3, "max_new_tokens": 32}
    params = SamplingParams.from_defaults(model.sampler, model.config, **settings)
    (expected,) = Generator(model).run([Request(prompt, params, seen)])
    asked = [each if isinstance(each, dict) else part(each) for each in content]
    answer = ask(sighted, asked, image_tokens=SMALL)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == tokenizer.decode(expected.token_ids)
    inputs: dict[str, Any] = {"messages": json.dumps(chat), "image_tokens": [SMALL], **settings}
    files = [png(each) for each in images]
    plain = [base64.b64encode(each).decode() for each in files]
    sent: tuple[Any, ...] = (("grpc", files), ("http", plain), ("http", [*map(url, files)]))
    for protocol, inputs["images"] in sent:
        port = getattr(sighted.served.server.ports, protocol)
        with Client(f"127.0.0.1:{port}", protocol, timeout=60) as client:
            found = client.infer(inputs)
        assert (found.prompt_token_ids, found.token_ids) == (prompt, expected.token_ids)


def test_decisions_and_responses_see_too(sighted: Sighted) -> None:
    model, tokenizer = open_model(sighted.engines.path, threads=1), Tokenizer.load(sighted.engines)
    questions: list[Any] = [{"type": "predicate", "instructions": "Is it noise?"}]
    decision = Ask.from_json({"questions": questions})
    seen = [read_picture(png(ONE), model.config.vision or {}, SMALL)]
    chat: Any = [{"role": "user", "content": [{"type": "image"}, text("Look.")]}]
    (result,) = Generator(model).run([decision.request(chat, model, tokenizer, 3, seen)])
    assert isinstance(result, DecisionResult)
    expected = decision.answers(result.draws)
    image = {"type": "input_image", "image_url": url(png(ONE))}
    words = {"type": "input_text", "text": "Look."}
    own = {"seed": 3, "image_tokens": SMALL}
    given: Any = {"model": "canvasrt", "input": [{"role": "user", "content": [image, words]}]}
    reply = sighted.client.decisions.create(**given, questions=questions, extra_body=own)
    assert [answer.to_dict() for answer in reply.answers] == expected
    assert reply.usage.input_tokens == len(result.prompt_token_ids) > 60
    inputs = {"messages": json.dumps(chat), "images": [png(ONE)], "image_tokens": [SMALL]}
    asked = {**inputs, "questions": json.dumps(questions), "seed": 3}
    with Client(f"127.0.0.1:{sighted.served.server.ports.grpc}", "grpc", timeout=60) as client:
        assert json.loads(client.infer(asked).text)["answers"] == expected
    response = sighted.client.responses.create(**given, max_output_tokens=32, extra_body=own)
    same = ask(sighted, [part(ONE), text("Look.")], image_tokens=SMALL)
    assert response.output_text == same.choices[0].message.content
    assert response.usage.input_tokens == same.usage.prompt_tokens


@pytest.mark.parametrize("form", [None, {"type": "regex", "regex": "|".join(COLORS)}])
@pytest.mark.parametrize("budget", [SMALL, FULL])
def test_chats_name_the_color(sighted: Sighted, budget: int, form: Any) -> None:
    dots, own = pictures()[0], {"image_tokens": budget, "response_format": form}
    seen, unseen = (
        ask(sighted, [part(labelled.png(each)), text("color?")], **own).choices[0].message.content
        for each in (dots, blank(dots))
    )
    assert seen == dots.color
    assert (unseen in COLORS) == bool(form)


def test_budgets(sighted: Sighted) -> None:
    """The budget of soft tokens comes from the request, from OpenAI's low detail, or from the checkpoint."""

    def tokens(detail: str = "auto", **fields: Any) -> int:
        content = [part(noise(96, 96), detail=detail)]
        return int(ask(sighted, content, max_denoising_steps=1, **fields).usage.prompt_tokens)

    around = tokens(image_tokens=70) - 64  # 8 × 8 soft tokens of at most 70
    assert tokens(detail="low") == tokens("low", image_tokens=140) == 64 + around
    assert tokens(image_tokens=140) == 121 + around
    assert tokens() == tokens("high") == 256 + around


def test_an_image_asked_about_again_is_not_encoded_again(sighted: Sighted) -> None:
    asked = (noise(90, 70, 7), noise(90, 70, 7), noise(90, 70, 8))
    first, again, other = (ask(sighted, [part(each)]).usage for each in asked)
    assert first.prompt_tokens == again.prompt_tokens == other.prompt_tokens
    found = [each.prompt_tokens_details.cached_tokens for each in (first, again, other)]
    assert found == [0, again.prompt_tokens, 0]


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("chat/completions", [part(b"hello")], "nsupported image format"),
        ("chat/completions", [part(ONE)] * 40, "exceed the context"),
        ("decisions", [part(b"hello")], "nsupported image format"),
    ],
)
def test_wrong_images_are_refused(
    sighted: Sighted, path: str, content: list[Any], says: str
) -> None:
    field = "input" if path == "decisions" else "messages"
    body: Any = {"model": "canvasrt", field: [{"role": "user", "content": content}]}
    if path == "decisions":
        body["questions"] = [{"type": "predicate", "instructions": "?"}]
    with pytest.raises(BadRequestError, match=says) as error:
        sighted.client.post(f"/{path}", body=body, cast_to=object)
    assert error.value.body["param"] == field


def test_the_image_token_s_spelling_is_no_image(sighted: Sighted) -> None:
    assert ask(sighted, [part(ONE), text("<|image|>")]).usage.prompt_tokens > 0


def test_tritons_budgets_are_one_per_image(grpc: Client) -> None:
    with pytest.raises(CanvasError, match="2 numbers, but the request has 1 images"):
        grpc.infer({"prompt": "a", "images": [png(noise(9, 9))], "image_tokens": [70, 70]})


def test_a_model_without_a_tower_refuses_images(agent: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [part(ONE)]}]
    with pytest.raises(BadRequestError, match="no vision tower"):
        agent.chat.completions.create(model="canvasrt", messages=messages)


def test_the_command_line_asks_the_server(
    sighted: Sighted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.yaml"
    questions.write_text(WHICH_COLOR)
    image = str(Path(__file__).parents[3] / "docs" / "dots.webp")
    call = ["ask", sighted.served.front.url, str(questions), "color?", "--image", image, "--json"]
    assert run(call) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["choice"] == "purple"


def test_ollama_s_images_are_seen(sighted: Sighted) -> None:
    dots = pictures()[0]
    image = base64.b64encode(labelled.png(dots)).decode()
    message = {"role": "user", "content": "color?", "images": [image]}
    body = {"model": "canvasrt", "messages": [message], "stream": False, "options": {"seed": 1}}
    address = sighted.served.front.url.removesuffix("/v1")
    reply = httpx2.post(f"{address}/api/chat", json=body, timeout=60)
    assert reply.json()["message"]["content"] == dots.color
