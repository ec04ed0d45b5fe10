"""Parses a model's text into reasoning, tool calls and answer text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from canvasrt.chat_tokens import CALL, CALL_END, CONTROL_TOKENS, FORGED, QUOTE, THOUGHT, THOUGHT_END
from canvasrt.containers.openai.tool_arguments import CallError, read_arguments

_OPENING = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
_NAME = re.compile(r"\s*call:([\w.:-]+)\s*(?=\{)")
# The channel's name, with which a thought begins.
_CHANNEL = "thought\n"


@dataclass(frozen=True)
class ToolCall:
    """One tool call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_json(self) -> dict[str, Any]:
        """Return the call as an element of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Piece:
    """Answer text, reasoning text, or a complete tool call together with its index in the answer."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None
    index: int = 0


def text_of(pieces: Iterable[Piece], kind: str) -> str:
    """Return the joined text of all pieces of one kind."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


class PlainText:
    """A parser for plain text: everything is answer text."""

    def put(self, text: str, final: bool = False) -> list[Piece]:
        """Return the text as a piece, unless it is empty."""
        text = text.replace(FORGED, "")
        return [Piece("content", text)] if text else []


class AnswerParser:
    """Parses an answer that arrives in parts and contains the model's control tokens.

    Spaces around thoughts and calls are syntax, and are dropped. A call is returned once it is complete. A call that
    the token limit truncates is dropped, because its arguments would not be valid JSON. A call that cannot be parsed is
    returned as text.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]] | None = None, parallel: bool = True
    ) -> None:
        """`tools` maps tools' names to the schemas of their parameters. If it is None, calls are returned as text.

        If `parallel` is false, only the first call is returned.
        """
        self._tools = tools
        self._parallel = parallel
        self._region: Literal["content", "thought", "call"] = "content"
        self._text = ""  # not parsed yet
        self._begun = False  # whether text of this region was already returned
        self._plain = True  # no thought or call was seen yet, so leading spaces are kept
        self.calls = 0

    def put(self, text: str, final: bool = False) -> list[Piece]:
        """Return the pieces that `text` completes. If `final`, return all remaining text, too."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces, final):
            pass
        return pieces

    def _step(self, pieces: list[Piece], final: bool) -> bool:
        """Parse the text up to the next control token. Return whether there can be more to parse."""
        if self._region == "content":
            return self._content(pieces, final)
        if self._region == "thought":
            return self._thought(pieces, final)
        body, found, rest = self._text.partition(CALL_END)
        if not (found or final):
            return False
        self._text = rest
        self._call(pieces, body, whole=bool(found))
        self._enter("content")
        return bool(found)

    def _content(self, pieces: list[Piece], final: bool) -> bool:
        mark = _OPENING.search(self._text)
        if mark is None:
            keep = 0 if final else _held(self._text, CONTROL_TOKENS)
            given = self._text[: len(self._text) - keep]
            self._text = self._text[len(given) :]
            self._say(pieces, given)
            return False
        self._say(pieces, self._text[: mark.start()].rstrip())
        self._text = self._text[mark.end() :]
        self._plain = False
        if mark[0] in (THOUGHT, CALL):  # unmatched closing marks are dropped
            self._enter("thought" if mark[0] == THOUGHT else "call")
        return True

    def _enter(self, region: Literal["content", "thought", "call"]) -> None:
        self._region, self._begun = region, False

    def _say(self, pieces: list[Piece], text: str) -> None:
        if not self._begun and not self._plain:
            text = text.lstrip()
        if text:
            self._begun = True
            pieces += PlainText().put(text)

    def _thought(self, pieces: list[Piece], final: bool) -> bool:
        body, found, rest = self._text.partition(THOUGHT_END)
        if found or final:
            given, self._text = body.rstrip(), rest
        else:
            keep = _held(body, (THOUGHT_END,))
            given, rest = body[: len(body) - keep], body[len(body) - keep :]
            if not self._begun and _CHANNEL.startswith(given):
                return False  # this is perhaps only a part of the channel's name
            self._text = rest
        if not self._begun:
            given = "" if given == _CHANNEL.strip() else given.removeprefix(_CHANNEL).lstrip()
        if given:
            self._begun = True
            pieces.append(Piece("reasoning", given.replace(FORGED, "")))
        if found:
            self._enter("content")
        return bool(found)

    def _call(self, pieces: list[Piece], body: str, whole: bool) -> None:
        call = self._read(body)
        if call is None:
            if whole:  # a truncated call is dropped
                self._say(pieces, body.replace(QUOTE, '"').strip())
            return
        if self._parallel or not self.calls:
            pieces.append(Piece("call", call=call, index=self.calls))
            self.calls += 1

    def _read(self, body: str) -> ToolCall | None:
        name = _NAME.match(body)
        if self._tools is None or name is None:
            return None
        try:
            arguments = read_arguments(body[name.end() :].strip(), self._tools.get(name[1]))
        except CallError:
            return None
        text = json.dumps(arguments, ensure_ascii=False).replace(FORGED, "")
        return ToolCall(name[1], text)


def _held(text: str, marks: tuple[str, ...]) -> int:
    """Return how many trailing characters could still turn out to be syntax: spaces before a mark, and the beginning of
    a mark."""
    begun = max(
        (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0
    )
    head = text[: len(text) - begun]
    return begun + len(head) - len(head.rstrip())
