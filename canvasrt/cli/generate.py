"""`canvasrt generate`: text from a bundle, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.options import AsJson, BundlePath, Device, SharePasses, Threads
from canvasrt.cli.prompt import PromptIds, PromptInput, PromptText, Raw, System, read_prompt
from canvasrt.cli.sampling import LABELS, with_sampling
from canvasrt.errors import CanvasError, UsageError

if TYPE_CHECKING:
    from canvasrt.runtime.generator import Block, Event, Request, Result, Settled
    from canvasrt.runtime.request import BlockScore
    from canvasrt.runtime.tokenizer import StreamDecoder, Tokenizer

Count = Annotated[
    int, typer.Option("--n", min=1, help="Number of answers, with consecutive seeds from --seed.")
]
Stream = Annotated[bool, typer.Option("--stream", help="Print text as soon as it is final.")]
Drafts = Annotated[
    bool,
    typer.Option("--drafts", help="Print the draft of each step too; on a terminal, in place."),
]
Infill = Annotated[
    str | None,
    typer.Option(
        "--infill",
        metavar="TEXT",
        show_default=False,
        help="Fill the gaps of a text such as 'The cat {4} on the {2-3} mat'; they count tokens.",
    ),
]
CanvasJson = Annotated[
    str | None,
    typer.Option(
        "--canvas",
        metavar="JSON",
        show_default=False,
        help='Tokens that positions begin with, hold, or may have, such as {"pin": {"0": 17}}.',
    ),
]


@with_sampling
def generate(
    bundle: BundlePath,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    system: System = None,
    raw: Raw = False,
    n: Count = 1,
    *,
    sampling: dict[str, Any],
    stream: Stream = False,
    drafts: Drafts = False,
    infill: Infill = None,
    canvas: CanvasJson = None,
    threads: Threads = None,
    device: Device = None,
    share_passes: SharePasses = False,
    as_json: AsJson = False,
) -> None:
    """Generate text from a bundle, in this process.

    Example: canvasrt generate engines "12+34=" --stream
    """
    if n > 1 and (stream or drafts):
        raise UsageError(
            f"--n {n} does not allow {'--stream' if stream else '--drafts'}",
            "leave out --n to stream one answer",
        )
    if infill is not None:
        if n > 1 or stream or drafts:
            raise UsageError("--infill fills one text", "leave out --n, --stream and --drafts")
        if prompt is None and prompt_ids is None:
            prompt = _infill_prompt(infill)
    given = read_prompt(prompt, prompt_ids, system, raw)
    conditions = read_canvas(canvas, infill)

    from canvasrt.runtime.generator import Generator, Request
    from canvasrt.runtime.open import open_model
    from canvasrt.runtime.sampling import SamplingParams

    model = open_model(bundle, threads, device=device, share_passes=share_passes)
    tokenizer = _tokenizer(model, required=given.ids is None or infill is not None)
    ids = _encode(tokenizer, given)
    params = SamplingParams.from_defaults(model.sampler, model.config, LABELS, **sampling)
    params.check_fits(model.config, LABELS)
    if infill is not None:
        assert tokenizer is not None
        _fill(infill, ids, params, model, tokenizer, as_json)
        return
    requests = [
        Request(ids, replace(params, seed=params.seed + i), conditions=conditions) for i in range(n)
    ]
    generator = Generator(model)
    if stream or drafts:
        events = generator.stream(requests[0])
        show = _stream_json if as_json else _stream_text
        show(events, requests[0], tokenizer, drafts)
        return
    answers = [_answer(result, tokenizer) for result in generator.run(requests)]
    if as_json:
        print(json.dumps(answers[0] if n == 1 else answers, indent=2, ensure_ascii=False))
        return
    for index, answer in enumerate(answers):
        if n > 1:
            print(f"{chr(10) if index else ''}--- seed {answer['seed']}")
        print(_shown(answer["text"], answer["token_ids"]))


def read_canvas(text: str | None, infill: str | None = None) -> Any:
    """Return the conditions of --canvas. UsageError for what they are not, or with --infill."""
    if text is None:
        return None
    if infill is not None:
        raise UsageError("--infill has a canvas of its own", "leave out --canvas")

    from canvasrt.runtime.conditions import read_conditions

    try:
        return read_conditions(json.loads(text))
    except json.JSONDecodeError as error:
        raise UsageError(f"--canvas is not JSON: {error}", 'give {"pin": {"0": 17}}') from None
    except CanvasError as error:
        raise UsageError(f"--{error.message}", error.hint) from None


def _infill_prompt(text: str) -> str:
    from canvasrt.runtime.answers.infill import default_prompt

    return default_prompt(text)


def _fill(
    text: str, ids: list[int], params: Any, model: Any, tokenizer: Tokenizer, as_json: bool
) -> None:
    """Fill the gaps of a text, and print it."""
    from canvasrt.runtime.answers.infill import InfillResult, filled, infill_request
    from canvasrt.runtime.generator import Generator

    request = infill_request(text, ids, params, model, tokenizer)
    (result,) = Generator(model).run([request])
    assert isinstance(result, InfillResult)
    shown = {**filled(result, tokenizer), "seed": result.seed, "steps": result.steps}
    print(json.dumps(shown, indent=2, ensure_ascii=False) if as_json else shown["text"])


def _tokenizer(model: Any, required: bool) -> Tokenizer | None:
    from canvasrt.runtime.tokenizer import Tokenizer

    try:
        return Tokenizer.load(model.bundle)
    except CanvasError:
        if required:
            raise
        return None


def _encode(tokenizer: Tokenizer | None, prompt: PromptInput) -> list[int]:
    if prompt.ids is not None:
        return prompt.ids
    assert tokenizer is not None
    return tokenizer.encode(prompt.text) if prompt.raw else tokenizer.encode_chat(prompt.messages)


def _answer(result: Result, tokenizer: Tokenizer | None) -> dict[str, Any]:
    words = _without_end(result.token_ids, result.finish_reason)
    return {
        "text": None if tokenizer is None else tokenizer.decode(words),
        "token_ids": result.token_ids,
        "prompt_token_ids": result.prompt_token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "steps": result.steps,
        **({"logprobs": [asdict(each) for each in result.logprobs]} if result.logprobs else {}),
        **_scores(result.block_scores),
        "seconds": {
            "first_block": result.timings.first_block,
            "total": result.timings.total,
        },
    }


def _scores(scores: Sequence[BlockScore]) -> dict[str, Any]:
    return {"block_scores": [asdict(each) for each in scores]} if scores else {}


def _without_end(ids: list[int], finish: str | None) -> list[int]:
    """Return the ids of the answer's text, without the token that ended it, which may have a
    spelling."""
    return ids[:-1] if finish == "stop" else ids


def _shown(text: str | None, ids: list[int]) -> str:
    """Return the text, or the token ids when there is no tokenizer."""
    return ",".join(map(str, ids)) if text is None else text


def _stream_json(
    events: Iterator[Event], request: Request, tokenizer: Tokenizer | None, drafts: bool
) -> None:
    """Print one JSON object per event and line; the last has what `--json` prints without `--stream`."""
    from canvasrt.runtime.generator import Block, Draft, Settled

    def put(**line: Any) -> None:
        print(json.dumps(line, ensure_ascii=False), flush=True)

    for event in events:
        if isinstance(event, Draft):
            if drafts:
                ids = event.tokens.tolist()
                text = None if tokenizer is None else tokenizer.decode(ids)
                put(event="draft", block=event.block, step=event.step, text=text, token_ids=ids)
        elif isinstance(event, Settled):
            text = None if tokenizer is None else tokenizer.decode(event.tokens)
            put(
                event="settled",
                block=event.block,
                step=event.step,
                text=text,
                token_ids=event.tokens,
            )
        elif isinstance(event, Block):
            words = _without_end(event.tokens, event.finish)
            text = None if tokenizer is None else tokenizer.decode(words)
            put(
                event="block",
                block=event.block,
                steps=event.steps,
                text=text,
                token_ids=event.tokens,
            )
        else:
            put(event="finished", **_answer(event.result, tokenizer))


def _stream_text(
    events: Iterator[Event], request: Request, tokenizer: Tokenizer | None, drafts: bool
) -> None:
    """Print text once it is final; with drafts, also the canvas after each step."""
    from canvasrt.cli.drafts import DraftView
    from canvasrt.runtime.generator import Block, Draft, Settled
    from canvasrt.runtime.tokenizer import StreamDecoder

    decoder = None if tokenizer is None else StreamDecoder(tokenizer)
    view = DraftView(tokenizer, request.params.eos_token_ids) if drafts else None
    try:
        for event in events:
            if isinstance(event, Draft) and view is not None:
                view.draft(event)
            elif isinstance(event, Settled | Block):
                piece = _piece(event, decoder)
                finish = event.finish if isinstance(event, Block) else None
                if view is None:
                    print(piece, end="\n" if finish else "", flush=True)
                elif isinstance(event, Settled):
                    view.settled(event, piece)
                else:
                    view.block(event, piece)
    finally:
        if view is not None:
            view.close()


def _piece(event: Settled | Block, decoder: StreamDecoder | None) -> str:
    """Return what an event adds to the answer so far."""
    from canvasrt.runtime.generator import Block

    finish, sent = (event.finish, event.settled) if isinstance(event, Block) else (None, 0)
    tokens = event.tokens[sent:]
    if decoder is None:
        return _shown(None, tokens) + ("" if finish else ",")
    return decoder.put(_without_end(tokens, finish), final=finish is not None)
