"""`canvasrt infer`: one call to a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from canvasrt.cli import options
from canvasrt.cli import prompt as prompts
from canvasrt.console import emit, emit_line
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import UsageError

if TYPE_CHECKING:
    from canvasrt.containers.client.triton import Protocol

PROTOCOLS = ("http", "grpc", "openai")
Url = Annotated[
    str | None,
    options.option(
        "--url",
        "HOST:PORT",
        "The server's address.",
        show_default="the protocol's port on this machine",
    ),
]
ProtocolName = Annotated[
    str, typer.Option("--protocol", metavar="NAME", help="http, grpc or openai.")
]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Print text as soon as it is final; needs grpc or openai."),
]
Stop = Annotated[
    list[str] | None,
    options.option(
        "--stop",
        "TEXT",
        "Text that ends the answer, which is cut before it; may be given several times.",
    ),
]


@prompts.with_sampling
def infer(
    prompt: prompts.PromptText = None,
    url: Url = None,
    protocol: ProtocolName = "http",
    prompt_ids: prompts.PromptIds = None,
    system: prompts.System = None,
    raw: prompts.Raw = False,
    *,
    sampling: dict[str, Any],
    stop: Stop = None,
    canvas: prompts.CanvasJson = None,
    stream: Stream = False,
    drafts: prompts.Drafts = False,
    timeout: prompts.AnswerTimeout = ANSWER_TIMEOUT,
    as_json: options.AsJson = False,
) -> None:
    """Send a prompt to a running server.

    Example: canvasrt infer "12+34=" --protocol grpc --stream
    """
    from canvasrt.containers.triton.inputs import check_stops

    _check(protocol, stream, drafts)
    given = prompts.read_prompt(prompt, prompt_ids, system, raw)
    prompts.canvas_conditions(canvas)  # checks the canvas before the call
    options.read_option(lambda: check_stops(stop or ()))
    inputs = {**_inputs(given), **sampling, "stop": stop or None, "canvas": canvas}
    ask = _openai if protocol == "openai" else partial(_triton, cast("Protocol", protocol))
    for data, text in ask(url, timeout, inputs, stream, drafts):
        if not (stream or drafts):
            emit(data, lambda _, text=text: print(text))  # type: ignore[misc]
        elif not as_json:
            print(text, end="", flush=True)
        elif data is not None:
            emit_line(data)


def _inputs(prompt: prompts.PromptInput) -> dict[str, Any]:
    """Return a prompt as inputs of the served model: tensor name → value."""
    if prompt.ids is not None:
        return {"prompt_ids": prompt.ids}
    if prompt.system is not None:
        return {"messages": json.dumps(prompt.messages)}
    return {"prompt": prompt.text, "raw": prompt.raw or None}


def _check(protocol: str, stream: bool, drafts: bool) -> None:
    """Raise UsageError for an unknown protocol, and for --stream or --drafts over a protocol that cannot stream."""
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown protocol {protocol!r}", f"give one of {', '.join(PROTOCOLS)}")
    if (stream or drafts) and protocol == "http":
        raise UsageError(
            "Triton does not stream over --protocol http",
            "give --protocol grpc or openai, or leave out --stream and --drafts",
        )


# Pairs of JSON and text: one pair for the whole answer, or one per event. Only the JSON or only the text is printed.
Shown = Iterator[tuple[Any, str]]


def _triton(
    protocol: Protocol,
    url: str | None,
    timeout: float,
    inputs: dict[str, Any],
    stream: bool,
    drafts: bool,
) -> Shown:
    from canvasrt.containers.client.triton import Client

    with Client(url, protocol, timeout) as client:
        if not (stream or drafts):
            answer = client.infer(inputs)
            yield answer.to_json(), answer.text
            return
        for event in client.stream({**inputs, "drafts": drafts or None}):
            text = "\n"
            if event.event == "draft":
                text = f"[block {event.block}, step {event.step}] {event.text}\n"
            elif event.event in ("settled", "block"):
                text = event.text or ""
            yield event.to_json(), text


def _openai(
    url: str | None, timeout: float, inputs: dict[str, Any], stream: bool, drafts: bool
) -> Shown:
    from canvasrt.containers.client.openai import OpenAIClient

    client = OpenAIClient(url, timeout)
    if not (stream or drafts):
        answer = client.ask(inputs)
        yield answer, answer["text"]
        return
    for piece, draft in client.events(inputs, drafts):
        if draft is None:
            yield {"text": piece}, piece
        else:
            best = "".join(draft["best"][: draft["end"]])
            yield (
                {"draft": draft},
                f"[block {draft['block']}, step {draft['step']}] {best}\n",
            )
    yield None, "\n"
