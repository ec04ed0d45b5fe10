"""`canvasrt generate`: text from a bundle, in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.options import AsJson, BundlePath, Device, SharePasses
from canvasrt.errors import CanvasError, UsageError

if TYPE_CHECKING:
    from canvasrt.runtime.generator import Block, Event, Request, Result
    from canvasrt.runtime.tokenizer import StreamDecoder, Tokenizer

Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT", show_default=False, help="The user's message; - reads it from stdin."
    ),
]
PromptIds = Annotated[
    str | None,
    typer.Option(
        "--prompt-ids",
        metavar="3,4,5",
        show_default=False,
        help="Token ids to continue as they are, in place of PROMPT.",
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", show_default=False, help="A system message."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue PROMPT itself: no chat template.")]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same tokens.")]
Count = Annotated[
    int, typer.Option("--n", min=1, help="Answers to one prompt, with seeds from --seed upwards.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", show_default="the checkpoint's", help="The token budget."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", show_default="the checkpoint's", help="Denoising steps a block at most."
    ),
]
TMin = Annotated[
    float | None,
    typer.Option("--t-min", show_default=False, help="The last step's temperature, nearly."),
]
TMax = Annotated[
    float | None,
    typer.Option("--t-max", show_default=False, help="The first step's temperature."),
]
EntropyBound = Annotated[
    float | None,
    typer.Option(
        "--entropy-bound", show_default=False, help="How much uncertainty a step accepts, in nats."
    ),
]
EarlyStop = Annotated[
    bool,
    typer.Option(
        "--early-stop/--all-steps",
        help="Finish a block once it is stable and confident, or take every step.",
    ),
]
Stream = Annotated[bool, typer.Option("--stream", help="Show each block as it is finished.")]
Drafts = Annotated[
    bool,
    typer.Option("--drafts", help="Show the draft of every step too; on a terminal, in place."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, show_default="every core", help="CPU threads."),
]


def generate(
    bundle: BundlePath,
    prompt: Prompt = None,
    prompt_ids: PromptIds = None,
    system: System = None,
    raw: Raw = False,
    seed: Seed = 0,
    n: Count = 1,
    max_new_tokens: MaxNewTokens = None,
    steps: Steps = None,
    t_min: TMin = None,
    t_max: TMax = None,
    entropy_bound: EntropyBound = None,
    early_stop: EarlyStop = True,
    stream: Stream = False,
    drafts: Drafts = False,
    threads: Threads = None,
    device: Device = None,
    share_passes: SharePasses = False,
    as_json: AsJson = False,
) -> None:
    """Generate text from a bundle, in this process.

    Example: canvasrt generate build/demo "Add 17 and 25" --stream
    """
    if n > 1 and (stream or drafts):
        raise UsageError(f"--n {n} with --stream", "stream one answer at a time: leave out --n")
    ids, text = _prompt(prompt, prompt_ids, system, raw)

    from canvasrt.runtime.generator import Generator, Request
    from canvasrt.runtime.open import open_model
    from canvasrt.runtime.sampling import SamplingParams

    model = open_model(bundle, threads, device=device, share_passes=share_passes)
    tokenizer = _tokenizer(model, required=ids is None)
    if ids is None:
        assert tokenizer is not None
        ids = _encode(tokenizer, text, system, raw)
    requests = [
        Request(
            ids,
            SamplingParams.from_defaults(
                model.sampler,
                model.config,
                seed=seed + i,
                max_new_tokens=max_new_tokens,
                max_denoising_steps=steps,
                t_min=t_min,
                t_max=t_max,
                entropy_bound=entropy_bound,
                adaptive_stop=early_stop,
            ),
        )
        for i in range(n)
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


def _prompt(
    prompt: str | None, prompt_ids: str | None, system: str | None, raw: bool
) -> tuple[list[int] | None, str]:
    """The prompt's token ids when they were given, else its text."""
    if prompt_ids is not None:
        if prompt is not None or system is not None or raw:
            raise UsageError(
                "--prompt-ids stands for the whole prompt",
                "leave out PROMPT, --system and --raw, or leave out --prompt-ids",
            )
        return _ids(prompt_ids), ""
    if prompt is None:
        raise UsageError("there is no prompt", "give PROMPT, - for stdin, or --prompt-ids 3,4,5")
    if raw and system is not None:
        raise UsageError("--raw has no place for --system", "leave one of them out")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise CanvasError("the prompt is empty", "give some text, or token ids with --prompt-ids")
    return None, text


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise CanvasError(
            f"--prompt-ids is not a list of token ids: {text!r}",
            "give whole numbers separated by commas: --prompt-ids 3,4,5",
        ) from None


def _tokenizer(model: Any, required: bool) -> Tokenizer | None:
    from canvasrt.runtime.tokenizer import Tokenizer

    try:
        return Tokenizer.load(model.bundle)
    except CanvasError:
        if required:
            raise
        return None


def _encode(tokenizer: Tokenizer, text: str, system: str | None, raw: bool) -> list[int]:
    if raw:
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def _answer(result: Result, tokenizer: Tokenizer | None) -> dict[str, Any]:
    words = _without_end(result.token_ids, result.finish_reason)
    return {
        "text": None if tokenizer is None else tokenizer.decode(words),
        "token_ids": result.token_ids,
        "prompt_token_ids": result.prompt_token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "steps": result.steps,
        "seconds": {
            "first_block": result.timings.first_block,
            "total": result.timings.total,
        },
    }


def _without_end(ids: list[int], finish: str | None) -> list[int]:
    """Ids of the answer's text: the token that ended it may have a spelling, and is no part of it."""
    return ids[:-1] if finish == "stop" else ids


def _shown(text: str | None, ids: list[int]) -> str:
    """Text for a reader; token ids where there is no tokenizer to spell them."""
    return ",".join(map(str, ids)) if text is None else text


def _stream_json(
    events: Iterator[Event], request: Request, tokenizer: Tokenizer | None, drafts: bool
) -> None:
    """One JSON object a line and event; the last holds what `--json` alone prints."""
    from canvasrt.runtime.generator import Block, Draft

    def put(**line: Any) -> None:
        print(json.dumps(line, ensure_ascii=False), flush=True)

    for event in events:
        if isinstance(event, Draft):
            if drafts:
                ids = event.tokens.tolist()
                text = None if tokenizer is None else tokenizer.decode(ids)
                put(event="draft", block=event.block, step=event.step, text=text, token_ids=ids)
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
    """Text as it becomes final; with drafts, what each step would answer."""
    from canvasrt.cli.drafts import DraftView
    from canvasrt.runtime.generator import Block, Draft
    from canvasrt.runtime.tokenizer import StreamDecoder

    decoder = None if tokenizer is None else StreamDecoder(tokenizer)
    view = DraftView(tokenizer, request.params.eos_token_ids) if drafts else None
    try:
        for event in events:
            if isinstance(event, Draft) and view is not None:
                view.draft(event)
            elif isinstance(event, Block):
                piece = _piece(event, decoder)
                if view is not None:
                    view.block(event, piece)
                else:
                    print(piece, end="\n" if event.finish else "", flush=True)
    finally:
        if view is not None:
            view.close()


def _piece(event: Block, decoder: StreamDecoder | None) -> str:
    """What a block adds to the answer shown so far."""
    if decoder is None:
        return _shown(None, event.tokens) + ("" if event.finish else ",")
    words = _without_end(event.tokens, event.finish)
    return decoder.put(words, final=event.finish is not None)
