"""`canvasrt generate`: generates text from a bundle, in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli import options
from canvasrt.cli import prompt as prompts
from canvasrt.cli.generate_output import answer_of, show_answers, stream_json, stream_text
from canvasrt.console import emit
from canvasrt.defaults import SOFT_TOKENS
from canvasrt.errors import UsageError
from canvasrt.runtime.sampling_params import PARAMETERS

if TYPE_CHECKING:
    from canvasrt.runtime.answers.infill import InfillRequest
    from canvasrt.runtime.model import Model
    from canvasrt.runtime.pictures import Picture
    from canvasrt.runtime.tokenizer import Tokenizer

Engines = Annotated[
    Path, options.argument("BUNDLE", "A folder that `canvasrt export` or `canvasrt build` wrote.")
]
Count = Annotated[
    int, typer.Option("--n", min=1, help="Number of answers; their seeds count up from --seed.")
]
Stream = Annotated[bool, typer.Option("--stream", help="Print text as soon as it is final.")]
Infill = Annotated[
    str | None,
    options.option(
        "--infill",
        "TEXT",
        "Fill the gaps of a text such as 'The cat {4} on the {2-3} mat'; braces hold the number of tokens.",
    ),
]


@prompts.with_sampling
def generate(
    bundle: Engines,
    prompt: prompts.PromptText = None,
    prompt_ids: prompts.PromptIds = None,
    system: prompts.System = None,
    raw: prompts.Raw = False,
    image: prompts.Images = None,
    image_tokens: prompts.ImageTokens = SOFT_TOKENS,
    n: Count = 1,
    *,
    sampling: dict[str, Any],
    stream: Stream = False,
    drafts: prompts.Drafts = False,
    infill: Infill = None,
    canvas: prompts.CanvasJson = None,
    threads: options.Threads = None,
    device: options.Device = None,
    share_passes: options.SharePasses = False,
    as_json: options.AsJson = False,
) -> None:
    """Generate text from a bundle, in this process.

    Example: canvasrt generate engines "12+34=" --stream
    """
    _check(n, stream, drafts, infill)
    for each in PARAMETERS:
        if each.beside_text and sampling.get(each.name) and not as_json:
            raise UsageError(f"{each.option} has no effect without --json", "add --json")
    if infill is not None and prompt is None and prompt_ids is None:
        from canvasrt.runtime.answers.infill import default_prompt

        prompt = default_prompt(infill)
    given = prompts.read_prompt(prompt, prompt_ids, system, raw)
    conditions = prompts.canvas_conditions(canvas, infill)
    if image and (raw or given.ids is not None):
        raise UsageError(
            "--image cannot be combined with --raw or --prompt-ids",
            "leave out --raw, and give PROMPT",
        )
    files = prompts.read_images(image or (), image_tokens)

    from canvasrt.runtime.answers.infill import infill_request
    from canvasrt.runtime.generator import Generator
    from canvasrt.runtime.open import open_model
    from canvasrt.runtime.request import Request
    from canvasrt.runtime.sampling_params import SamplingParams

    model = open_model(bundle, threads, device=device, share_passes=share_passes)
    tokenizer = _tokenizer(model, required=given.ids is None or infill is not None)
    pictures = prompts.pictures_of(files, image_tokens, model)
    ids = _encode(tokenizer, given, pictures, model)
    params = SamplingParams.from_defaults(model.sampler, model.config, prompts.LABELS, **sampling)
    params.check_fits(model.config, prompts.LABELS)
    if infill is not None:
        assert tokenizer is not None
        request = infill_request(infill, ids, params, model, tokenizer, pictures)
        _fill(request, model, tokenizer)
        return
    room = model.max_context - len(ids)
    params = params.fitted(model.config, room, model.canvas_sizes, "max_new_tokens" not in sampling)
    requests = [
        Request(ids, replace(params, seed=params.seed + i), pictures, conditions=conditions)
        for i in range(n)
    ]
    generator = Generator(model)
    if stream or drafts:
        show = stream_json if as_json else stream_text
        show(generator.stream(requests[0]), requests[0], tokenizer, drafts)
        return
    show_answers([answer_of(each, tokenizer) for each in generator.run(requests)])


def _check(n: int, stream: bool, drafts: bool, infill: str | None) -> None:
    """Raise UsageError for options that cannot be combined."""
    if n > 1 and (stream or drafts):
        raise UsageError(
            f"--n {n} does not allow {'--stream' if stream else '--drafts'}",
            "leave out --n to stream one answer",
        )
    if infill is not None:
        if n > 1 or stream or drafts:
            raise UsageError(
                "--infill cannot be combined with --n, --stream or --drafts", "leave those out"
            )

        from canvasrt.runtime.answers.infill import read_gaps

        options.read_option(lambda: read_gaps(infill))


def _fill(request: InfillRequest, model: Model, tokenizer: Tokenizer) -> None:
    """Fill the gaps of a text, and print it."""
    from canvasrt.runtime.answers.infill import InfillResult, filled
    from canvasrt.runtime.generator import Generator

    (result,) = Generator(model).run([request])
    assert isinstance(result, InfillResult)
    shown = {**filled(result, tokenizer), "seed": result.seed, "steps": result.steps}
    emit(shown, lambda _: print(shown["text"]))


def _tokenizer(model: Any, required: bool) -> Tokenizer | None:
    from canvasrt.runtime.tokenizer import Tokenizer

    return Tokenizer.load(model.bundle) if required or model.bundle.manifest.tokenizer else None


def _encode(
    tokenizer: Tokenizer | None, prompt: prompts.PromptInput, pictures: list[Picture], model: Model
) -> list[int]:
    if prompt.ids is not None:
        return prompt.ids
    assert tokenizer is not None
    if prompt.raw:
        return tokenizer.encode(prompt.text)
    if not pictures:
        return tokenizer.encode_chat(prompt.messages)

    from canvasrt.runtime.pictures import insert

    *before, last = prompt.messages
    images = [{"type": "image"} for _ in pictures]
    content = [*images, {"type": "text", "text": last["content"]}]
    ids = tokenizer.encode_chat([*before, {**last, "content": content}])
    return insert(ids, pictures, model.config)
