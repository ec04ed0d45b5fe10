"""Takes a model's text apart into thoughts, tool calls and what is said to the caller."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from canvasrt.chat_tokens import CALL, CALL_END, CONTROL_TOKENS, QUOTE, THOUGHT, THOUGHT_END
from canvasrt.containers.openai.tool_arguments import CallError, read_arguments

_OPENING = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
_NAME = re.compile(r"\s*call:([\w.:-]+)\s*(?=\{)")
# The channel's name, which stands before the thought.
_CHANNEL = "thought\n"


@dataclass(frozen=True)
class ToolCall:
    """One tool call; `arguments` is a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_json(self) -> dict[str, Any]:
        """Return the call as a message has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Piece:
    """Text for the caller or of a thought, or a whole call and its number."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None
    number: int = 0


class AnswerReader:
    """Takes an answer's text in pieces, with the model's control tokens in it.

    Spaces around thoughts and calls are the syntax's, and are dropped. A call comes out once it is
    whole. One that the token limit cuts short is dropped, since its arguments would not be JSON;
    one that cannot be read comes out as text.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Any]] | None = None, parallel: bool = True
    ) -> None:
        """`tools` are the schemas of the parameters by name; without any, calls come out as text.

        Without `parallel`, only the first call comes out.
        """
        self._tools = tools
        self._parallel = parallel
        self._region: Literal["content", "thought", "call"] = "content"
        self._text = ""  # not taken apart yet
        self._begun = False  # the region has given text
        self._plain = True  # nothing but content so far: its spaces are the caller's
        self.calls = 0

    def put(self, text: str, final: bool = False) -> list[Piece]:
        """Return what `text` completes; after the `final` one, nothing is left."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces, final):
            pass
        return pieces

    def _step(self, pieces: list[Piece], final: bool) -> bool:
        """Take one region's text. Return whether another region has begun."""
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
        if mark[0] in (THOUGHT, CALL):  # the others are strays, and nobody's text
            self._enter("thought" if mark[0] == THOUGHT else "call")
        return True

    def _enter(self, region: Literal["content", "thought", "call"]) -> None:
        self._region, self._begun = region, False

    def _say(self, pieces: list[Piece], text: str) -> None:
        if not self._begun and not self._plain:
            text = text.lstrip()
        if text:
            self._begun = True
            pieces.append(Piece("content", text))

    def _thought(self, pieces: list[Piece], final: bool) -> bool:
        body, found, rest = self._text.partition(THOUGHT_END)
        if found or final:
            given, self._text = body.rstrip(), rest
        elif not self._begun and _CHANNEL.startswith(body):
            return False  # perhaps only a part of the channel's name
        else:
            keep = _held(body, (THOUGHT_END,))
            given, self._text = body[: len(body) - keep], body[len(body) - keep :]
        if not self._begun:
            given = "" if given == _CHANNEL.strip() else given.removeprefix(_CHANNEL).lstrip()
        if given:
            self._begun = True
            pieces.append(Piece("reasoning", given))
        if found:
            self._enter("content")
        return bool(found)

    def _call(self, pieces: list[Piece], body: str, whole: bool) -> None:
        call = self._read(body)
        if call is None:
            if whole:  # a call that was cut short is nobody's text
                self._say(pieces, body.replace(QUOTE, '"').strip())
            return
        if self._parallel or not self.calls:
            pieces.append(Piece("call", call=call, number=self.calls))
            self.calls += 1

    def _read(self, body: str) -> ToolCall | None:
        name = _NAME.match(body)
        if self._tools is None or name is None:
            return None
        try:
            arguments = read_arguments(body[name.end() :].strip(), self._tools.get(name[1]))
        except CallError:
            return None
        return ToolCall(name[1], json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class Answer:
    """A whole answer, taken apart."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def read(cls, reader: AnswerReader, text: str) -> Answer:
        """Take a whole text apart."""
        pieces = reader.put(text, final=True)
        joined = {
            kind: "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in ("content", "reasoning")
        }
        calls = tuple(piece.call for piece in pieces if piece.call is not None)
        return cls(joined["content"], joined["reasoning"], calls)

    def to_message(self) -> dict[str, Any]:
        """Return the answer as a chat's message."""
        content = None if self.calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_json() for call in self.calls]
        return message


def _held(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end may be dropped once more text is known: spaces, which
    a mark may follow, and the beginning of a mark."""
    begun = max(
        (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0
    )
    head = text[: len(text) - begun]
    return begun + len(head) - len(head.rstrip())
