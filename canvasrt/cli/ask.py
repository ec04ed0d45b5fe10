"""`canvasrt ask`: answers closed questions about a text, with a probability per option."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli import prompt
from canvasrt.cli.options import AsJson, Device, Threads, argument, is_url, option, refuse
from canvasrt.console import emit, table
from canvasrt.defaults import MAX_SAMPLES, MAX_STEPS, SOFT_TOKENS
from canvasrt.errors import CanvasError, UsageError

if TYPE_CHECKING:
    from canvasrt.runtime.answers.layout import Ask

Where = Annotated[
    str,
    argument(
        "BUNDLE_OR_URL",
        "A bundle to run in this process, or a server's address, such as http://127.0.0.1:8000.",
    ),
]
Questions = Annotated[
    Path,
    argument(
        "QUESTIONS.yaml",
        "YAML or JSON: a list of questions in the format of OpenAI's Decisions API, or an object with the"
        " fields questions, layout, samples and steps.",
    ),
]
Input = Annotated[
    str,
    argument("INPUT", "The text; - reads it from stdin."),
]
Samples = Annotated[
    int | None,
    option(
        "--samples",
        "N",
        "Draws of noise to average over.",
        show_default="the file's, else 1",
        min=1,
        max=MAX_SAMPLES,
    ),
]
Steps = Annotated[
    int | None,
    option(
        "--steps",
        "N",
        "Denoising steps per read.",
        show_default="the file's, else 1",
        min=1,
        max=MAX_STEPS,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME",
        show_default="the file's, else letters",
        help="letters: options are listed in the prompt. bare: INPUT is the whole prompt, and an"
        " option is the whole answer.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the noise.")]


def ask(
    context: typer.Context,
    where: Where,
    questions: Questions,
    input: Input,
    samples: Samples = None,
    steps: Steps = None,
    layout: Layout = None,
    seed: Seed = 0,
    image: prompt.Images = None,
    image_tokens: prompt.ImageTokens = SOFT_TOKENS,
    threads: Threads = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Answer closed questions about a text, with a probability per option.

    Example: canvasrt ask engines questions.yaml "12+34="
    """
    if is_url(where):
        refuse(context, ("threads", "device"), "has no effect on a server", "leave it out")
    _check_layout(layout)
    if not input.strip():
        raise UsageError("INPUT is empty", "give some text")
    files = prompt.read_images(image or (), image_tokens)
    decisions = _read(questions)
    given = {"samples": samples, "steps": steps, "layout": layout}
    decisions |= {name: value for name, value in given.items() if value is not None}
    from canvasrt.runtime.answers.layout import Ask

    wanted = Ask.from_json(decisions)  # a server would ignore unknown fields
    text = prompt.read_text(input)
    if is_url(where):
        urls = [prompt.data_url(*each) for each in files]
        found = _of_server(where, decisions, text, seed, urls, image_tokens)
    else:
        found = _of_bundle(Path(where), wanted, text, seed, files, image_tokens, threads, device)
    columns = ("question", "answer", "probability", "standard error")
    rows = _rows(decisions, found["answers"])
    emit(found, lambda shown: shown.print(table(columns, rows)))


def _check_layout(layout: str | None) -> None:
    if layout is not None:
        from canvasrt.runtime.answers.layout import LAYOUTS

        if layout not in LAYOUTS:
            raise UsageError(f"--layout is {layout!r}", f"give one of {', '.join(LAYOUTS)}")


def _read(file: Path) -> dict[str, Any]:
    """Return the fields in a file of questions. If the file is a list, return it as the field `questions`."""
    from canvasrt.recipes.fields import read_yaml

    data = read_yaml(file, "give a YAML file of questions")
    data = {"questions": data} if isinstance(data, list) else data
    if not isinstance(data, dict) or not isinstance(data.get("questions"), list):
        raise CanvasError(f"{file} holds no questions", "give a list of questions")
    return data


def _of_bundle(
    bundle: Path,
    wanted: Ask,
    text: str,
    seed: int,
    images: list[tuple[Path, bytes]],
    budget: int,
    threads: Any,
    device: Any,
) -> dict[str, Any]:
    from canvasrt.runtime.answers.decision import DecisionResult
    from canvasrt.runtime.generator import Generator
    from canvasrt.runtime.open import open_model
    from canvasrt.runtime.tokenizer import Tokenizer

    model = open_model(bundle, threads, device=device)
    tokenizer = Tokenizer.load(model.bundle)
    pictures = prompt.pictures_of(images, budget, model)
    content: Any = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    message = {"role": "user", "content": content if pictures else text}
    request = wanted.request([message], model, tokenizer, seed, pictures)
    (result,) = Generator(model).run([request])
    assert isinstance(result, DecisionResult)
    return {
        "answers": wanted.answers(result.draws),
        "seed": result.seed,
        "passes": sum(result.steps),
        "prompt_tokens": len(result.prompt_token_ids),
    }


def _of_server(
    url: str, decisions: dict[str, Any], text: str, seed: int, images: list[str], budget: int
) -> dict[str, Any]:
    from canvasrt.containers.client.openai import OpenAIClient

    client = OpenAIClient(url)
    body = {**decisions, "model": client.model, "input": text, "seed": seed}
    if images:
        parts: list[Any] = [{"type": "input_image", "image_url": each} for each in images]
        content = [*parts, {"type": "input_text", "text": text}]
        body |= {"input": [{"role": "user", "content": content}], "image_tokens": budget}
    reply = client.post("decisions", body)
    try:
        found = {
            "answers": reply["answers"],
            **reply["canvasrt"],
            "prompt_tokens": reply["usage"]["input_tokens"],
        }
        _rows(decisions, found["answers"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # another vendor's form
        raise CanvasError(
            f"what answers at {client.url} has not the form of canvasrt's Decisions API",
            "give the address of a server that `canvasrt serve` started",
        ) from error
    return found


def _rows(decisions: dict[str, Any], answers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for question, answer in zip(decisions["questions"], answers, strict=True):
        name = answer["name"] or str(question["instructions"])
        if answer["type"] == "predicate":
            rows.append((name, "yes", *_numbers(answer)))
            continue
        for each in answer["probabilities"]:
            rows.append((name, str(each.get("label", each["value"])), *_numbers(each)))
            name = ""
    return rows


def _numbers(shown: dict[str, Any]) -> tuple[str, str]:
    error = shown["standard_error"]
    return f"{shown['probability']:.4f}", "" if error is None else f"{error:.4f}"
