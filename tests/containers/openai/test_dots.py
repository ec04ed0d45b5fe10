"""The bundled checkpoint that sees answers about pictures through the real server and client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from canvasrt.bundle import load_bundle
from canvasrt.cli.app import run
from canvasrt.demo.dots import COLORS, Dots
from canvasrt.demo.labelled import png
from tests.helpers import library
from tests.helpers.dots import FULL, SMALL, WHICH_COLOR, blank, pictures
from tests.helpers.scripted import client_of, serving
from tests.helpers.serving import needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def sees(_one_thread: None) -> Iterator[OpenAI]:
    """A client of a server of the checkpoint."""
    bundle = load_bundle(library.bundle("demo-vision"))
    with serving(bundle) as served, client_of(served) as client:
        yield client


def url(dots: Dots) -> str:
    return "data:image/png;base64," + base64.b64encode(png(dots)).decode()


def ask(client: OpenAI, dots: Dots, budget: int, **more: Any) -> Any:
    """Ask for a picture's color."""
    image = {"type": "image_url", "image_url": {"url": url(dots)}}
    content: Any = [image, {"type": "text", "text": "color?"}]
    return client.chat.completions.create(
        model="canvasrt",
        messages=[{"role": "user", "content": content}],
        max_tokens=32,
        seed=1,
        extra_body={"image_tokens": budget, **more},
    )


@pytest.mark.parametrize("form", [None, {"type": "regex", "regex": "|".join(COLORS)}])
@pytest.mark.parametrize("budget", [SMALL, FULL])
def test_chats_name_the_color(sees: OpenAI, budget: int, form: Any) -> None:
    dots = pictures()[0]
    answer = ask(sees, dots, budget, response_format=form)
    assert answer.choices[0].message.content == dots.color
    assert answer.usage.prompt_tokens > 0.8 * budget
    unseen = ask(sees, blank(dots), budget, response_format=form).choices[0].message.content
    assert (unseen in COLORS) == bool(form)


def test_an_image_asked_about_again_is_not_encoded_again(sees: OpenAI) -> None:
    dots = pictures()[1]
    inverse = replace(dots, pixels=255 - dots.pixels)
    first, again, other = (ask(sees, each, FULL).usage for each in (dots, dots, inverse))
    assert first.prompt_tokens == again.prompt_tokens == other.prompt_tokens
    found = [each.prompt_tokens_details.cached_tokens for each in (first, again, other)]
    assert found == [0, again.prompt_tokens, 0]


def test_the_command_line_asks_the_server(
    sees: OpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.yaml"
    questions.write_text(WHICH_COLOR)
    image = str(Path(__file__).parents[3] / "docs" / "dots.webp")
    address = str(sees.base_url).rstrip("/")
    assert run(["ask", address, str(questions), "color?", "--image", image, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["choice"] == "purple"


def test_ollama_s_images_are_seen(sees: OpenAI) -> None:
    dots = pictures()[0]
    message = {"role": "user", "content": "color?", "images": [url(dots).partition(",")[2]]}
    body = {"model": "canvasrt", "messages": [message], "stream": False, "options": {"seed": 1}}
    address = str(sees.base_url).removesuffix("/v1/")
    reply = httpx2.post(f"{address}/api/chat", json=body, timeout=60)
    assert reply.json()["message"]["content"] == dots.color
