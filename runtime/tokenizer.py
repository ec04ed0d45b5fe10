"""Converts text to token ids and back with a bundle's tokenizer files, without transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from canvasrt.bundle import Bundle
from canvasrt.chat_tokens import CONTROL_TOKENS, THOUGHT, THOUGHT_END, TURN_END
from canvasrt.errors import CanvasError

Message = Mapping[str, Any]
REPLACEMENT = "\ufffd"
# Variables of a chat template that are not the caller's.
_RESERVED = ("messages", "add_generation_prompt")
_MOST_OPEN = 4096  # tokens that may wait for a character to be complete
_UNUSED = re.compile(r"<unused\d+>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_table() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as GPT-2 has it."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES = _byte_table()


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self, core: FastTokenizer, template: str | None, special: Mapping[str, str] | None = None
    ) -> None:
        self._core = core
        self._special = dict(special or {})
        self._template = _environment().from_string(template) if template else None
        # Words suffice: a template's own names do not look like a caller's.
        self._words = frozenset(re.findall(r"\w+", template or ""))
        added = core.get_added_tokens_decoder()
        self._hidden = {
            id
            for id, token in added.items()
            if token.special and token.content not in CONTROL_TOKENS
        }

    @classmethod
    def load(cls, bundle: Bundle) -> Tokenizer:
        """Load the bundle's tokenizer. Raises CanvasError if it has none."""
        files = {Path(rel).name: bundle.file(rel) for rel in bundle.manifest.tokenizer or ()}
        if "tokenizer.json" not in files:
            raise CanvasError(
                f"the bundle {bundle.path} has no tokenizer",
                "give token ids with --prompt-ids, or export a checkpoint that has tokenizer.json",
            )
        config = {}
        if "tokenizer_config.json" in files:
            config = json.loads(files["tokenizer_config.json"].read_text("utf-8"))
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
        return cls(FastTokenizer.from_file(str(files["tokenizer.json"])), template, special)

    @property
    def has_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._template is not None

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages` with the chat template; `variables` (tools, ...) are passed on to it.

        Raises CanvasError if there is no template, or if it refuses the messages.
        """
        if self._template is None:
            raise CanvasError(
                "the model's tokenizer has no chat template",
                "continue the text as it is, with raw (--raw on the command line), or give token ids",
            )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **variables},
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise CanvasError(
                f"the chat template refused the messages: {error}",
                "give messages with `role` and `content`, in the order that the model expects",
            ) from error

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of a chat, up to where the model's answer begins."""
        # The template writes the beginning-of-sequence token itself.
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def open_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any], prefix: str = ""
    ) -> tuple[list[int], str]:
        """Return the token ids of a chat whose answer begins with `prefix`, and that beginning.

        Some templates begin the answer too, with a thought after a tool's result. `variables` are
        the template's; CanvasError for one that it does not have, unless it is false or empty.
        """
        self._check(messages, variables)
        text = self.render_chat(messages, **{k: v for k, v in variables.items() if v is not None})
        start = text.rfind(THOUGHT)
        opening = text[start:] if start > text.rfind(THOUGHT_END) else ""
        if TURN_END in opening:  # some message's own text
            opening = ""
        if opening and prefix:
            text, opening = text + THOUGHT_END, opening + THOUGHT_END
        return self.encode(text + prefix, add_special_tokens=False), opening + prefix

    def closed_chat(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a chat without the beginning of an answer."""
        self._check(messages, variables)
        given = {k: v for k, v in variables.items() if v is not None}
        text = self.render_chat(messages, add_generation_prompt=False, **given)
        return self.encode(text, add_special_tokens=False)

    def _check(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> None:
        for name, value in variables.items():
            if name in _RESERVED or name in self._special:
                raise CanvasError(
                    f"{name} is a template variable that callers cannot set", f"leave out {name}"
                )
            if value and self._template is not None and name not in self._words:
                raise CanvasError(
                    f"{name} is not a variable of the model's chat template",
                    f"leave out {name}, or serve a checkpoint whose template supports it",
                )
        acts = any(each.get("tool_calls") or each.get("role") == "tool" for each in messages)
        if acts and self._template is not None and "tool_calls" not in self._words:
            raise CanvasError(
                "messages hold tool calls, which the model's chat template does not support",
                "send only text, or serve a checkpoint whose template supports tools",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of plain text, with the tokenizer's own special tokens (usually
        bos)."""
        # A batch of one, because that releases the interpreter's lock: long texts take seconds.
        (encoded,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def control_id(self, text: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        id: int | None = self._core.token_to_id(text)
        return id

    def spell(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary has it; an unknown one is empty."""
        return [self._core.id_to_token(id) or "" for id in ids]

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for."""
        return max(len(token.encode()) for token in self._core.get_vocab())

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that a token stands for; none for a special or unknown one."""
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
        """Return the text of token ids. `keep_control` spells the tokens in CONTROL out."""
        if keep_control:
            ids, skip_special = [id for id in ids if id not in self._hidden], False
        return self._core.decode(list(ids), skip_special_tokens=skip_special)


class StreamDecoder:
    """Turns blocks of token ids into pieces of text that add up to the whole text."""

    def __init__(self, tokenizer: Tokenizer, keep_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_control = keep_control
        # The tokens of the last whole piece, which later ones may join, and those after it.
        self._before: list[int] = []
        self._open: list[int] = []
        self._given = 0  # characters of the open tokens that were returned already

    def put(self, ids: Sequence[int], final: bool = False) -> str:
        """Return the text that `ids` add.

        An incomplete character waits for the next call, unless this is the `final` one.
        """
        self._open += ids
        before = len(self._text(self._before))
        text = self._text([*self._before, *self._open])
        waits = text.endswith(REPLACEMENT) and not final and len(self._open) < _MOST_OPEN
        if waits:
            text = text.rstrip(REPLACEMENT)
        piece = text[before + self._given :]
        self._given = max(self._given, len(text) - before)
        if not waits and self._open:
            # Decoders treat the beginning of a text differently, so some text stays in front.
            front = [] if len(text) > before else self._before
            self._before, self._open, self._given = [*front, *self._open], [], 0
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, keep_control=self._keep_control)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers renders templates in. Templates are untrusted, hence
    the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _Generation(jinja2.ext.Extension):
    """Treats `{% generation %}` blocks, which mark answers for training, as plain content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter would escape HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
