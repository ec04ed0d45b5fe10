"""The bundled checkpoint with a vision tower names the color of dots on pictures that were not used in training, and
its tokens equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.demo.mixture import image_processor
from bench.demo.tokenizer import IMAGE_ID
from canvasrt.cli.app import run
from canvasrt.demo.dots import COLORS, DOTS_PROMPTS, Dots, right_answer
from canvasrt.demo.labelled import png
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.pictures import insert, read_picture
from canvasrt.runtime.request import Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.dots import FULL, SMALL, WHICH_COLOR, blank, pictures
from tests.helpers.reference import Pair

ROOT = Path(__file__).parents[2]
COLOR, COUNT = DOTS_PROMPTS


def answer(pair: Pair, dots: Dots, text: str, budget: int, seed: int) -> tuple[str, Result]:
    """Return canvasrt's answer, after comparing it with that of transformers."""
    picture = read_picture(png(dots), pair.model.config.vision or {}, budget)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    ids = pair.tokenizer.encode_chat([{"role": "user", "content": content}])
    prompt = insert(ids, [picture], pair.model.config)
    params = SamplingParams.from_defaults(
        pair.model.sampler, pair.model.config, seed=seed, max_new_tokens=32
    )
    (result,) = Generator(pair.model).run([Request(prompt, params, [picture])])
    seen = image_processor(budget)([dots.pixels], return_tensors="pt")
    reference = pair.reference.generate(
        [prompt],
        [params],
        pixel_values=seen["pixel_values"].float(),
        image_position_ids=seen["image_position_ids"],
        mm_token_type_ids=torch.tensor([[int(id == IMAGE_ID) for id in prompt]]),
    )
    reference.check([result])
    return pair.tokenizer.decode(result.token_ids), result


@pytest.mark.parametrize("budget", [SMALL, FULL])
def test_it_names_every_color(demo_vision: Pair, budget: int) -> None:
    for seed, dots in enumerate(pictures()):
        text, result = answer(demo_vision, dots, COLOR, budget, seed)
        assert text == right_answer(dots, COLOR)
        assert result.finish_reason == "stop"
        assert len(result.prompt_token_ids) > 0.8 * budget


def test_it_counts_most_dots_and_finds_no_color_without_them(demo_vision: Pair) -> None:
    right = 0
    for seed, dots in enumerate(pictures()):
        right += answer(demo_vision, dots, COUNT, SMALL, seed)[0] == right_answer(dots, COUNT)
        assert answer(demo_vision, blank(dots), COLOR, SMALL, seed)[0] not in COLORS
    assert right >= len(pictures()) - 1


def test_the_command_line_asks_about_images(
    demo_vision: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.yaml"
    questions.write_text(WHICH_COLOR)
    call = ["ask", str(demo_vision.bundle), str(questions), COLOR, "--json"]
    image = ["--image", str(ROOT / "docs" / "dots.webp")]
    assert run([*call, *image]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["choice"] == "purple"
    assert max(each["probability"] for each in answer["probabilities"]) > 0.9
    assert run(call) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["choice"] != "purple"
    assert run([*call, *image, "--image-tokens", "7"]) == 2


def test_the_command_line_takes_images(
    demo_vision: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The image is the README's picture."""
    call = ["generate", str(demo_vision.bundle), COLOR, "--seed", "1"]
    for budget in (SMALL, FULL):
        picture = ["--image", str(ROOT / "docs" / "dots.webp"), "--image-tokens", str(budget)]
        assert run([*call, *picture]) == 0
        assert capsys.readouterr().out == "purple\n"
    assert run([*call, *picture, "--infill", "{6}"]) == 0
    assert capsys.readouterr().out == "purple\n"
    assert run(call) == 0
    assert capsys.readouterr().out.strip() not in COLORS
    assert run([*call, "--image", "none.webp"]) == 1
    assert "cannot read an image" in capsys.readouterr().err
    text = str(ROOT / "README.md")
    assert run([*call, *picture, "--image", text]) == 1
    assert f"{text}: unsupported image format" in capsys.readouterr().err
