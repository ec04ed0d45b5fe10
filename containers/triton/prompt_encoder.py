"""Encodes prompts to token ids: after a length check, once per prompt, and without delaying other requests."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from canvasrt.containers.triton.inputs import (
    chosen_prompt,
    read_messages,
    read_object,
    read_template,
)
from canvasrt.containers.triton.replies import Reply, json_reply
from canvasrt.containers.triton.shared import Shared
from canvasrt.errors import CanvasError
from canvasrt.runtime.prefix import share_of
from canvasrt.runtime.request import Result, Timings
from canvasrt.runtime.tokenizer import Tokenizer

# Texts of up to this many bytes are encoded immediately; longer texts are encoded one at a time.
SHORT = 1 << 16
_MOST_COUNTED = 1 << 20  # maximum characters of a text that is only tokenized
_KEPT = 32  # number of encoded prompts to cache
_KEPT_TOKENS = 1 << 22


class EncodedPrompt(NamedTuple):
    """A prompt's token ids, int32 `[n]`. `opening`: the text at the end of the prompt that belongs to the answer."""

    ids: np.ndarray
    opening: str


class PromptEncoder:
    """Encodes prompts of at most `max_context` tokens. Several answers to one prompt share the result.

    Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._long = threading.Lock()
        self._prompts = Shared[EncodedPrompt](_KEPT, _KEPT_TOKENS, lambda prompt: prompt.ids.size)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if callers can only send token ids."""
        return self._tokenizer

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise CanvasError if the texts of a request with questions cannot fit the context."""
        chosen = chosen_prompt(values)
        for name in (chosen, "questions"):
            if self._tokenizer is not None and isinstance(values.get(name), str):
                self._check_length(name, values[name])

    def encode(self, values: Mapping[str, Any], owner: str = "") -> EncodedPrompt:
        """Encode a request's prompt. If an input is wrong, raises CanvasError, which names it."""
        chosen = chosen_prompt(values)
        if chosen == "prompt_ids":
            _no_chat(values, "prompt_ids")
            return EncodedPrompt(np.asarray(values["prompt_ids"], np.int32), "")
        if self._tokenizer is None:
            raise CanvasError(
                f"the model has no tokenizer, so it cannot encode {chosen}", "send prompt_ids"
            )
        text: str = values[chosen]
        parts = [chosen, str(bool(values.get("raw"))), text]
        for name in ("template", "prefix"):
            parts.append(values.get(name, ""))
        for name, part in (*zip(("template", "prefix"), parts[3:], strict=True), (chosen, text)):
            self._check_length(name, part)
        digest = hashlib.sha256()
        for part in (share_of(owner), *parts):
            digest.update(f"{len(part)} ".encode() + part.encode())
        return self._prompts.get(digest.digest(), lambda: self._encode(values, chosen))

    def tokenized(self, values: Mapping[str, Any], vocab_size: int, owner: str = "") -> Reply:
        """Return the single reply to a request with `tokenize`: the prompt's tokens, and JSON that contains its text.

        The text includes special tokens. The option `spell` adds every token's text. If an input is wrong, raises
        CanvasError, which names it.
        """
        options = _tokenize_options(values["tokenize"])
        ids = self._tokens(values, options, owner)
        foreign = [token for token in ids if not 0 <= token < vocab_size]
        if foreign:
            raise CanvasError(
                f"prompt token {foreign[0]} is not in the vocabulary",
                f"give token ids from 0 to {vocab_size - 1}",
            )
        tokenizer = self._tokenizer
        shown: dict[str, Any] = {"text": tokenizer.decode(ids, False) if tokenizer else ""}
        if options["spell"]:
            shown["tokens"] = tokenizer.spell(ids) if tokenizer else []
        return json_reply(Result([], ids, "stop", 0, [], Timings(None, 0.0)), shown)

    def _tokens(
        self, values: Mapping[str, Any], options: Mapping[str, bool], owner: str
    ) -> list[int]:
        chosen = chosen_prompt(values)
        tokenizer = self._tokenizer
        if chosen == "prompt_ids":
            return [int(token) for token in values["prompt_ids"]]
        if tokenizer is None:
            raise CanvasError(f"the model has no tokenizer to encode {chosen}", "send prompt_ids")
        if chosen == "prompt" and values.get("raw"):
            # The prompt can exceed the context, because callers may want to find out whether it does.
            if len(values["prompt"]) > _MOST_COUNTED:
                raise CanvasError(
                    f"prompt has {len(values['prompt'])} characters",
                    f"send at most {_MOST_COUNTED}",
                )
            with self._turn(values):
                return tokenizer.encode(values["prompt"], options["add_special_tokens"])
        self._check_length(chosen, values[chosen])
        if options["add_generation_prompt"]:
            return [int(token) for token in self.encode(values, owner).ids]
        with self._turn(values):
            return tokenizer.closed_chat(_chat(values, chosen), read_template(values))

    def _turn(self, values: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return a lock for long texts, so that threads work on them one at a time. Short texts do not wait."""
        return self._long if is_long(values) else nullcontext()

    def _check_length(self, chosen: str, text: str) -> None:
        """Raise CanvasError for a text that cannot fit the context, however it is tokenized."""
        assert self._tokenizer is not None
        most = self._max_context * self._tokenizer.longest_token
        # JSON can write a character as \uXXXX.
        most = 6 * most if chosen in ("messages", "template", "questions") else most
        if len(text) > most:
            raise CanvasError(
                f"{chosen} has {len(text)} characters, which exceed the context of"
                f" {self._max_context} tokens",
                "shorten it",
            )

    def _encode(self, values: Mapping[str, Any], chosen: str) -> EncodedPrompt:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        with self._turn(values):
            if chosen == "prompt" and not values["prompt"].strip():
                raise CanvasError("the prompt is empty", "send some text")
            if chosen == "prompt" and values.get("raw"):
                _no_chat(values, "raw")
                return _made(tokenizer.encode(values["prompt"]))
            chat, variables = _chat(values, chosen), read_template(values)
            return _made(*tokenizer.open_chat(chat, variables, values.get("prefix", "")))


SLOW = {"images", "grammar"}  # inputs that are slow to prepare even if they are short


def is_long(values: Mapping[str, Any]) -> bool:
    """Return whether a request's texts are so long that a thread must prepare them."""
    return sum(len(value) for value in values.values() if isinstance(value, str | bytes)) > SHORT


def _chat(values: Mapping[str, Any], chosen: str) -> list[dict[str, Any]]:
    if chosen == "messages":
        return read_messages(values["messages"])
    return [{"role": "user", "content": values["prompt"]}]


def _tokenize_options(text: str) -> dict[str, bool]:
    options = {"add_special_tokens": True, "add_generation_prompt": True, "spell": False}
    given = read_object("tokenize", text, 'send {}, or {"add_special_tokens": false}')
    for name, value in given.items():
        if name not in options:
            raise CanvasError(f"tokenize.{name} is unknown", f"give {', '.join(options)}")
        if not isinstance(value, bool):
            raise CanvasError(f"tokenize.{name} is {value!r}", "give true or false")
    return options | given


def _made(ids: list[int], opening: str = "") -> EncodedPrompt:
    array = np.array(ids, np.int32)
    array.flags.writeable = False  # shared by several requests
    return EncodedPrompt(array, opening)


def _no_chat(values: Mapping[str, Any], why: str) -> None:
    """Raise CanvasError if a request has inputs for a chat template, although it uses no template."""
    for name in ("template", "prefix"):
        if name in values:
            raise CanvasError(
                f"{name} has no effect with {why}, which uses no chat template",
                f"leave out {name}, or send messages",
            )
