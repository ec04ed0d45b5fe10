"""Images through the real server and clients give transformers' tokens. What the front end refuses itself is in
test_refusals.py."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from openai import BadRequestError, OpenAI
from PIL import Image
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from canvasrt.containers.client.triton import Client
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.decision import DecisionResult
from canvasrt.runtime.answers.layout import Ask
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import read_picture
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from tests.containers.openai.conftest import save_with_gemmas_words
from tests.helpers.pictures import noise, png
from tests.helpers.reference import Reference
from tests.helpers.scripted import Served, client_of, core, serving
from tests.helpers.serving import needs_triton

pytestmark = [needs_triton, pytest.mark.acceptance]
SETTINGS: dict[str, Any] = {
    "max_denoising_steps": 6,
    "entropy_bound": 1.0,
    "confidence_threshold": 1.0,
    "t_min": 0.4,
    "t_max": 0.8,
}


class Sighted(NamedTuple):
    """A server whose random model sees, its engines, the model in transformers, and a client."""

    engines: Path
    served: Served
    reference: Reference
    client: OpenAI

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.served.server.ports.grpc}"


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory, _one_thread: None) -> Iterator[Sighted]:
    from canvasrt.export.graphs import export_graphs
    from tests.helpers.random_models import random_model

    folder = tmp_path_factory.mktemp("sighted")
    shape = {"vocab_size": core().get_vocab_size(), "num_hidden_layers": 2}
    shape |= {"layer_types": ["sliding_attention", "full_attention"]}
    checkpoint = folder / "checkpoint"
    save_with_gemmas_words(random_model(shape, canvas=32, vision={"patch_size": 16}), checkpoint)
    bundle = export_graphs(checkpoint, folder / "graphs")
    loaded = DiffusionGemmaForBlockDiffusion.from_pretrained(checkpoint, dtype=torch.float32)
    with serving(bundle) as served, client_of(served) as client:
        yield Sighted(bundle.path, served, Reference(loaded), client)


def url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def part(image: Image.Image, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image), **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def answer_of(
    sighted: Sighted, body: str, images: list[Image.Image], budget: int, seed: int
) -> Any:
    """transformers' answer to a user's `body`, in which `<|image|>` stands for images."""
    seen = Gemma4ImageProcessorPil(max_soft_tokens=budget)(images, return_tensors="pt")
    counts = iter(seen["num_soft_tokens_per_image"])
    pieces = body.split("<|image|>")
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += f"<|image>{'<|image|>' * int(next(counts))}<image|>{piece}"
    prompt = f"<bos><|turn>user\n{whole}<turn|>\n<|turn>model\n"
    tokenizer = core()
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    image = tokenizer.token_to_id("<|image|>")
    params = SamplingParams(max_new_tokens=32, seed=seed, eos_token_ids=(1,), **SETTINGS)
    output = sighted.reference.generate(
        [ids],
        [params],
        pixel_values=seen["pixel_values"].float(),
        image_position_ids=seen["image_position_ids"],
        mm_token_type_ids=torch.tensor([[int(id == image) for id in ids]]),
    )
    return ids, output.tokens[0]


CASES: dict[str, tuple[list[Any], str, list[Image.Image]]] = {
    "one": (
        [text("What is "), part(noise(90, 70)), text("?")],
        "What is<|image|>?",
        [noise(90, 70)],
    ),
    "only": ([part(noise(30, 90, 1))], "<|image|>", [noise(30, 90, 1)]),
    "two": (
        [part(noise(64, 64, 2)), part(noise(20, 99, 3)), text("Compare.")],
        "<|image|><|image|>Compare.",
        [noise(64, 64, 2), noise(20, 99, 3)],
    ),
}


@pytest.mark.parametrize(("content", "body", "images"), CASES.values(), ids=CASES)
def test_tokens_are_those_of_transformers(
    sighted: Sighted, content: list[Any], body: str, images: list[Image.Image]
) -> None:
    prompt, tokens = answer_of(sighted, body, images, 70, seed=3)
    chat = [{"role": "user", "content": content}]
    answer = sighted.client.chat.completions.create(
        model="canvasrt",
        messages=chat,
        max_tokens=32,
        seed=3,
        extra_body={"image_tokens": 70, **SETTINGS},
    )
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens)
    parts = [each if each["type"] == "text" else {"type": "image"} for each in content]
    inputs: dict[str, Any] = {
        "messages": json.dumps([{"role": "user", "content": parts}]),
        "images": [png(image) for image in images],
        "image_tokens": [70],
        "max_new_tokens": 32,
        "seed": 3,
        **SETTINGS,
    }
    with Client(sighted.grpc, "grpc", timeout=60) as client:
        found = client.infer(inputs)
        assert (found.prompt_token_ids, found.token_ids) == (prompt, tokens)
        kept = client.infer({**inputs, "control": True})
        assert answer.choices[0].message.content.strip() in kept.text
        # In base64, as in JSON.
        inputs["images"] = [url(image) for image in images]
        assert client.infer(inputs).token_ids == tokens
    http = f"127.0.0.1:{sighted.served.server.ports.http}"
    with Client(http, "http", timeout=60) as client:
        assert client.infer(inputs).token_ids == tokens


def test_decisions_see_too(sighted: Sighted) -> None:
    """OpenAI's API and Triton's give the probabilities that this process computes."""
    model = open_model(sighted.engines, threads=1)
    assert model.bundle is not None
    tokenizer = Tokenizer.load(model.bundle)
    questions: list[Any] = [{"type": "predicate", "instructions": "Is it noise?"}]
    ask = Ask.from_json({"questions": questions})
    image = noise(90, 70)
    pictures = [read_picture(png(image), model.config.vision or {}, 70)]
    parts: list[Any] = [{"type": "image"}, {"type": "text", "text": "Look."}]
    chat = [{"role": "user", "content": parts}]
    (result,) = Generator(model).run([ask.request(chat, model, tokenizer, 3, pictures)])
    assert isinstance(result, DecisionResult)
    expected = ask.answers(result.draws)
    content: list[Any] = [
        {"type": "input_image", "image_url": url(image)},
        {"type": "input_text", "text": "Look."},
    ]

    reply = sighted.client.decisions.create(
        model="canvasrt",
        input=[{"role": "user", "content": content}],
        questions=questions,
        extra_body={"seed": 3, "image_tokens": 70},
    )
    assert [answer.to_dict() for answer in reply.answers] == expected
    assert reply.usage.input_tokens == len(result.prompt_token_ids) > 60
    inputs: dict[str, Any] = {
        "messages": json.dumps(chat),
        "images": [png(image)],
        "image_tokens": [70],
        "questions": json.dumps(questions),
        "seed": 3,
    }
    with Client(sighted.grpc, "grpc", timeout=60) as client:
        assert json.loads(client.infer(inputs).text)["answers"] == expected


def test_responses_see_too(sighted: Sighted) -> None:
    content = [{"type": "input_text", "text": "What is "}, {"type": "input_image"}]
    content[1]["image_url"] = url(noise(90, 70))
    response = sighted.client.responses.create(
        model="canvasrt",
        input=[{"role": "user", "content": content}],  # type: ignore[misc, list-item]
        max_output_tokens=32,
        extra_body={"image_tokens": 70, "seed": 3, **SETTINGS},
    )
    prompt, tokens = answer_of(sighted, "What is<|image|>", [noise(90, 70)], 70, seed=3)
    assert response.usage.input_tokens == len(prompt)
    assert response.usage.output_tokens == len(tokens)


def test_budgets(sighted: Sighted) -> None:
    """The budget comes from the request, from OpenAI's low detail, or else from the checkpoint."""

    def tokens(detail: str = "auto", **fields: Any) -> int:
        answer = sighted.client.chat.completions.create(
            model="canvasrt",
            messages=[{"role": "user", "content": [part(noise(96, 96), detail=detail)]}],
            max_tokens=8,
            extra_body={"max_denoising_steps": 1, **fields},
        )
        return answer.usage.prompt_tokens

    around = tokens(image_tokens=70) - 64  # 8 × 8 of at most 70
    assert tokens(detail="low") == tokens("low", image_tokens=140) == 64 + around
    assert tokens(image_tokens=140) == 121 + around
    assert tokens() == tokens("high") == 256 + around


GOOD = part(noise(20, 20))
TEXT_FILE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
ASKED = {"questions": [{"type": "predicate", "instructions": "?"}]}


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("chat/completions", [TEXT_FILE], "nsupported image format"),
        ("chat/completions", [GOOD] * 40, "exceed the context"),
        ("decisions", [TEXT_FILE], "nsupported image format"),
        ("decisions", [part(noise(4, 900))], "closer to a square"),
    ],
)
def test_wrong_images_are_refused(
    sighted: Sighted, path: str, content: list[Any], says: str
) -> None:
    field = "input" if path == "decisions" else "messages"
    body = {"model": "canvasrt", field: [{"role": "user", "content": content}]}
    body |= ASKED if path == "decisions" else {}
    with pytest.raises(BadRequestError, match=says) as error:
        sighted.client.post(f"/{path}", body=body, cast_to=object)
    assert error.value.body["param"] == field


def test_the_image_token_s_spelling_is_no_image(sighted: Sighted) -> None:
    messages: Any = [{"role": "user", "content": [GOOD, text("<|image|>")]}]
    answer = sighted.client.chat.completions.create(
        model="canvasrt", messages=messages, max_tokens=8
    )
    assert answer.usage.prompt_tokens > 0


def test_tritons_budgets_are_one_per_image(grpc: Client) -> None:
    with pytest.raises(CanvasError, match="2 numbers, but the request has 1 images"):
        grpc.infer({"prompt": "a", "images": [png(noise(9, 9))], "image_tokens": [70, 70]})


def test_a_model_without_a_tower_refuses_images(agent: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="no vision tower"):
        agent.chat.completions.create(
            model="canvasrt", messages=[{"role": "user", "content": [GOOD]}]
        )
