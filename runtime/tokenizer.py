"""Converts text to token ids and back with a bundle's tokenizer files, without transformers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from canvasrt.bundle import Bundle
from canvasrt.chat_tokens import CALL, CONTROL_TOKENS, FORGED, THOUGHT, THOUGHT_END, TURN_END
from canvasrt.errors import CanvasError
from canvasrt.runtime.chat_template import ChatTemplate, ControlTexts, check_characters

Message = Mapping[str, Any]
REPLACEMENT = "\ufffd"
# Variables of a chat template that callers cannot set.
_RESERVED = ("messages", "add_generation_prompt")
_LONGEST = max(map(len, CONTROL_TOKENS))
_MOST_OPEN = 4096  # maximum number of tokens to hold back for an incomplete character
_UNUSED = re.compile(r"<unused\d+>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_table() -> dict[str, int]:
    """Return GPT-2's mapping from the characters of a byte-level vocabulary to bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES = _byte_table()


@contextlib.contextmanager
def _readable(file: Path | None) -> Iterator[None]:
    """Turn any error into a CanvasError that names the file, because the libraries' own errors do not."""
    try:
        yield
    except Exception as error:  # tokenizers raises nothing more specific
        raise CanvasError(
            f"cannot use {file}: {error}", "the file is damaged: fetch it again"
        ) from error


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self, core: FastTokenizer, template: str | None, special: Mapping[str, str] | None = None
    ) -> None:
        self._core = core
        self._special = dict(special or {})
        # All words in the template, which include the names of its variables.
        self._words = frozenset(re.findall(r"\w+", template or ""))
        added = core.get_added_tokens_decoder()
        self._control = ControlTexts(
            token.content
            for token in added.values()
            if token.special
            or token.content in (*CONTROL_TOKENS, *self._special.values())
            or _UNUSED.fullmatch(token.content)
        )
        self._template = ChatTemplate(template, self._special, self._control) if template else None
        self.controls = {
            id: each for each in CONTROL_TOKENS if (id := core.token_to_id(each)) is not None
        }
        spelt = "|".join(map(re.escape, self.controls.values()))
        self.forged = re.compile(f"(?:{spelt})" if spelt else r"(?!)")

    @classmethod
    def load(cls, bundle: Bundle) -> Tokenizer:
        """Load the bundle's tokenizer. Raises CanvasError if the bundle has none."""
        files = {Path(rel).name: bundle.file(rel) for rel in bundle.manifest.tokenizer or ()}
        if "tokenizer.json" not in files:
            raise CanvasError(
                f"the bundle {bundle.path} has no tokenizer",
                "give token ids with --prompt-ids, or export a checkpoint that has tokenizer.json",
            )
        return cls.read(files)

    @classmethod
    def read(cls, files: Mapping[str, Path]) -> Tokenizer:
        """Create a tokenizer from its files. `files` maps names to paths, and must include `tokenizer.json`. Raises
        CanvasError for a damaged file."""
        settings, config = files.get("tokenizer_config.json"), {}
        if settings:
            with _readable(settings):
                config = dict(json.loads(settings.read_text("utf-8")))
        template = config.get("chat_template")
        if isinstance(template, list):  # named templates: [{"name": ..., "template": ...}]
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if "chat_template.jinja" in files:
            template = files["chat_template.jinja"].read_text("utf-8")
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        with _readable(files["tokenizer.json"]):
            core = FastTokenizer.from_file(str(files["tokenizer.json"]))
        with _readable(files.get("chat_template.jinja", settings)):
            return cls(core, template, special)

    @property
    def has_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._template is not None

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages` and `variables` (tools, …) with the chat template.

        Raises CanvasError if there is no template, or if the template refuses the messages.
        """
        return self._control.unmark(self._render(messages, add_generation_prompt, variables))

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return a rendered chat in which the template's control tokens are marked."""
        if self._template is None:
            raise CanvasError(
                "the model's tokenizer has no chat template",
                "set raw (--raw on the command line) to send text without a template, or give token ids",
            )
        chat = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return self._template.render({**variables, **chat})

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of a chat, up to the beginning of the model's answer. Only the template can write
        control tokens; in `messages` and `variables`, their spellings are encoded as text."""
        return self._encode(self._render(messages, True, variables))

    def open_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any], prefix: str = ""
    ) -> tuple[list[int], str]:
        """Return the token ids of a chat whose answer begins with `prefix`, and the beginning of the answer as text.

        The template can begin the answer as well: some templates open a thought after a tool's result. `prefix` can
        begin with the control token of a thought or a call; further control tokens in `prefix` are encoded as text.
        Raises CanvasError for a variable that the template does not use, unless its value is false or empty.
        """
        self._check(messages, variables)
        check_characters(prefix)
        text = self._render(messages, True, _given(variables))
        mark = self._control.mark
        thought, thought_end = mark(THOUGHT), mark(THOUGHT_END)
        start = text.rfind(thought) if thought != THOUGHT else -1
        closed = max(text.rfind(thought_end), text.rfind(mark(TURN_END)))
        opening = text[start:] if start > closed else ""
        if opening and prefix:
            text, opening = text + thought_end, opening + thought_end
        begun = next((each for each in (CALL, THOUGHT) if prefix.startswith(each)), "")
        ids = self._encode(text + mark(begun) + prefix.removeprefix(begun))
        return ids, self._control.unmark(opening) + prefix

    def closed_chat(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a chat that does not end with a prompt for an answer."""
        self._check(messages, variables)
        return self._encode(self._render(messages, False, _given(variables)))

    def _check(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> None:
        for name, value in variables.items():
            if name in _RESERVED or name in self._special:
                raise CanvasError(
                    f"{name} is a template variable that callers cannot set", "leave it out"
                )
            if value and self._template is not None and name not in self._words:
                raise CanvasError(
                    f"{name} is not a variable of the model's chat template",
                    "leave it out, or serve a checkpoint whose template supports it",
                )
        acts = any(each.get("tool_calls") or each.get("role") == "tool" for each in messages)
        if acts and self._template is not None and "tool_calls" not in self._words:
            raise CanvasError(
                "messages hold tool calls, which the model's chat template does not support",
                "send only text, or serve a checkpoint whose template supports tools",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a raw prompt, which can contain control tokens. `add_special_tokens` adds the
        tokenizer's own special tokens, usually bos."""
        # Encoding a batch, here of one text, releases the interpreter's lock. Long texts take seconds.
        (encoded,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of plain text, in which spellings of control tokens are encoded as text."""
        check_characters(text)
        return self._encode(text)

    def _encode(self, marked: str) -> list[int]:
        """Return the token ids of marked text."""
        # The template already writes the beginning-of-sequence token.
        encoded = self._core.encode_batch_fast(
            self._control.pieces(marked), add_special_tokens=False
        )
        return [id for piece in encoded for id in piece.ids]

    def control_id(self, text: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        id: int | None = self._core.token_to_id(text)
        return id

    def spell(self, ids: Sequence[int]) -> list[str]:
        """Return each token's spelling in the vocabulary, or an empty string for an unknown token."""
        return [self._core.id_to_token(id) or "" for id in ids]

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of bytes of one token's text."""
        return max(len(token.encode()) for token in self._core.get_vocab())

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token's text, which are empty for special, unused and unknown tokens."""
        token = self._core.id_to_token(id)
        if token is None or id in self._special_ids or _UNUSED.fullmatch(token):
            return b""
        if self._byte_level:
            return bytes(_BYTES[each] for each in token if each in _BYTES)
        if byte := _BYTE.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._core.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def _byte_level(self) -> bool:
        decoder = json.loads(self._core.to_str()).get("decoder")
        return "ByteLevel" in json.dumps(decoder)

    def decode(
        self, ids: Sequence[int], skip_special: bool = True, keep_control: bool = False
    ) -> str:
        """Return the text of token ids. `keep_control` keeps the tokens in CONTROL_TOKENS, and inserts FORGED where
        other tokens spell a control token."""
        if keep_control:
            return StreamDecoder(self, keep_control).put(ids, final=True)
        return self._core.decode(list(ids), skip_special_tokens=skip_special)


def _given(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variables.items() if value is not None}


class StreamDecoder:
    """Decodes blocks of token ids to pieces of text, whose concatenation is the whole text."""

    def __init__(self, tokenizer: Tokenizer, keep_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_control = keep_control
        # The tokens of the last complete piece, which are decoded again as context, and the tokens after it.
        self._before: list[int] = []
        self._open: list[int] = []
        self._given = 0  # number of characters of `_open` that were already returned
        self._tail = ""  # the last characters, in which a control token's spelling may begin

    def put(self, ids: Sequence[int], final: bool = False) -> str:
        """Return the text that `ids` add.

        Holds back an incomplete character until the next call, unless `final`.
        """
        if not self._keep_control:
            return self._put(ids, final)
        text, begin = "", 0
        for place, id in enumerate(ids):
            if (control := self._tokenizer.controls.get(id)) is not None:
                text += self._ordinary(self._put(ids[begin:place], True)) + control
                self._tail, begin = "", place + 1
        return text + self._ordinary(self._put(ids[begin:], final))

    def _ordinary(self, piece: str) -> str:
        """Return the text of ordinary tokens. Where they spell a control token, insert FORGED before the last character
        of the spelling, because the earlier characters may already have been returned."""
        text, before, begin = self._tail + piece, len(self._tail), 0
        parts = []
        for found in self._tokenizer.forged.finditer(text):
            parts += [text[begin : found.end() - 1], FORGED]
            begin = found.end() - 1
        self._tail = text[begin + bool(parts) :][1 - _LONGEST :]
        return "".join([*parts, text[begin:]])[before:]

    def _put(self, ids: Sequence[int], final: bool) -> str:
        self._open += ids
        before = len(self._text(self._before))
        text = self._text([*self._before, *self._open])
        waits = text.endswith(REPLACEMENT) and not final and len(self._open) < _MOST_OPEN
        if waits:
            text = text.rstrip(REPLACEMENT)
        piece = text[before + self._given :]
        self._given = max(self._given, len(text) - before)
        if not waits and self._open:
            # Decoders treat the beginning of a text differently, so some earlier tokens are decoded as context.
            front = [] if len(text) > before else self._before
            self._before, self._open, self._given = [*front, *self._open], [], 0
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)
