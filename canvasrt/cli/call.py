"""What `canvasrt infer` does: one call, printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from canvasrt.cli.prompt import PromptInput
from canvasrt.console import emit, emit_line
from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.containers.client.triton import Client, Protocol, StreamEvent
from canvasrt.errors import UsageError

PROTOCOLS = ("http", "grpc", "openai")


@dataclass(frozen=True)
class ClientCall:
    """One call to a server. `options` are inputs of the served model by tensor name."""

    prompt: PromptInput
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    drafts: bool = False

    def inputs(self) -> dict[str, Any]:
        """Return the inputs by tensor name."""
        return {**self._prompt(), **self.options}

    def _prompt(self) -> dict[str, Any]:
        if self.prompt.ids is not None:
            return {"prompt_ids": self.prompt.ids}
        if self.prompt.system is not None:
            return {"messages": json.dumps(self.prompt.messages)}
        return {"prompt": self.prompt.text, "raw": self.prompt.raw or None}


def check_call(protocol: str, stream: bool, drafts: bool) -> None:
    """Raise UsageError for an unknown protocol, or one that cannot stream."""
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown protocol {protocol!r}", f"give one of {', '.join(PROTOCOLS)}")
    if (stream or drafts) and protocol == "http":
        raise UsageError(
            "Triton does not stream over --protocol http",
            "give --protocol grpc or openai, or leave out --stream and --drafts",
        )


def ask(call: ClientCall, protocol: str, url: str | None, timeout: float, as_json: bool) -> None:
    """Make the call and print the answer, or each event as it comes."""
    if protocol == "openai":
        _ask_openai(call, url, timeout, as_json)
        return
    with Client(url, cast(Protocol, protocol), timeout) as client:
        if call.stream or call.drafts:
            for event in client.stream({**call.inputs(), "drafts": call.drafts or None}):
                _print_event(event, as_json)
            return
        answer = client.infer(call.inputs())
    emit(answer.to_json(), as_json, lambda shown: shown.print(answer.text, markup=False))


def _ask_openai(call: ClientCall, url: str | None, timeout: float, as_json: bool) -> None:
    client = OpenAIClient(url, timeout)
    if not (call.stream or call.drafts):
        answer = client.ask(call.inputs())
        emit(answer, as_json, lambda shown: shown.print(answer["text"], markup=False))
        return
    for piece, draft in client.events(call.inputs(), call.drafts):
        if as_json:
            line = {"text": piece} if draft is None else {"draft": draft}
            emit_line(line)
        elif draft is not None:
            best = "".join(draft["best"][: draft["end"]])
            print(f"[block {draft['block']}, step {draft['step']}] {best}", flush=True)
        else:
            print(piece, end="", flush=True)
    if not as_json:
        print(flush=True)


def _print_event(event: StreamEvent, as_json: bool) -> None:
    if as_json:
        emit_line(event.to_json())
    elif event.event == "draft":
        print(f"[block {event.block}, step {event.step}] {event.text}", flush=True)
    elif event.event in ("settled", "block"):
        print(event.text, end="", flush=True)
    else:
        print(flush=True)
