"""What `canvasrt infer` does with its arguments: one call, printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from canvasrt.console import emit
from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.containers.client.triton import Client, Protocol, StreamEvent
from canvasrt.errors import CanvasError

PROTOCOLS = ("http", "grpc", "openai")


@dataclass(frozen=True)
class Question:
    """A prompt as text (`-` for stdin) or as token ids separated by commas; options by tensor name."""

    prompt: str | None
    prompt_ids: str | None = None
    system: str | None = None
    raw: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self) -> dict[str, Any]:
        """Values by tensor name. CanvasError unless there is exactly one prompt."""
        return {**(self._text() if self.prompt_ids is None else self._ids()), **self.options}

    def _text(self) -> dict[str, Any]:
        if self.prompt is None:
            raise CanvasError(
                "there is no prompt", "give PROMPT, - for stdin, or --prompt-ids 3,4,5"
            )
        if self.raw and self.system is not None:
            raise CanvasError("--raw has no place for --system", "leave one of them out")
        text = sys.stdin.read() if self.prompt == "-" else self.prompt
        if self.system is None:
            return {"prompt": text, "raw": self.raw or None}
        chat = [("system", self.system), ("user", text)]
        return {"messages": json.dumps([{"role": role, "content": said} for role, said in chat])}

    def _ids(self) -> dict[str, Any]:
        if self.prompt is not None or self.system is not None or self.raw:
            raise CanvasError(
                "--prompt-ids stands for the whole prompt",
                "leave out PROMPT, --system and --raw, or leave out --prompt-ids",
            )
        try:
            return {"prompt_ids": [int(item) for item in (self.prompt_ids or "").split(",")]}
        except ValueError:
            raise CanvasError(
                f"--prompt-ids is not a list of token ids: {self.prompt_ids!r}",
                "give whole numbers separated by commas: --prompt-ids 3,4,5",
            ) from None


def ask(
    question: Question,
    url: str | None,
    protocol: str,
    timeout: float,
    *,
    stream: bool = False,
    drafts: bool = False,
    as_json: bool = False,
) -> None:
    """Makes the call and prints the answer, or each event as it comes."""
    _check_protocol(protocol)
    inputs = question.inputs()
    if protocol == "openai":
        _ask_openai(inputs, url, timeout, stream, drafts, as_json)
        return
    with Client(url, cast(Protocol, protocol), timeout) as client:
        if stream or drafts:
            for event in client.stream({**inputs, "drafts": drafts or None}):
                _print_event(event, as_json)
            return
        answer = client.infer(inputs)
    emit(answer.to_json(), as_json, lambda shown: shown.print(answer.text, markup=False))


def _ask_openai(
    inputs: Mapping[str, Any],
    url: str | None,
    timeout: float,
    stream: bool,
    drafts: bool,
    as_json: bool,
) -> None:
    if drafts:
        raise CanvasError(
            "drafts change, and what the OpenAI API has sent must not",
            "give --protocol grpc, or --stream alone",
        )
    client = OpenAIClient(url, timeout)
    if not stream:
        answer = client.ask(inputs)
        emit(answer, as_json, lambda shown: shown.print(answer["text"], markup=False))
        return
    for piece in client.stream(inputs):
        if as_json:
            print(json.dumps({"text": piece}, ensure_ascii=False), flush=True)
        else:
            print(piece, end="", flush=True)
    if not as_json:
        print(flush=True)


def _check_protocol(protocol: str) -> None:
    if protocol not in PROTOCOLS:
        raise CanvasError(
            f"unknown protocol {protocol!r}", f"give --protocol {', '.join(PROTOCOLS)}"
        )


def _print_event(event: StreamEvent, as_json: bool) -> None:
    if as_json:
        print(json.dumps(event.to_json(), ensure_ascii=False), flush=True)
    elif event.event == "draft":
        print(f"[block {event.block}, step {event.step}] {event.text}", flush=True)
    elif event.event == "block":
        print(event.text, end="", flush=True)
    else:
        print(flush=True)
