"""Encodes or decodes a prompt without generating an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canvasrt.containers.triton.inputs import read_object
from canvasrt.containers.triton.prompt_encoder import PromptEncoder
from canvasrt.containers.triton.replies import Reply, json_reply
from canvasrt.errors import CanvasError
from canvasrt.runtime.request import Result, Timings

_OPTIONS = ("add_special_tokens", "add_generation_prompt", "spell")


def tokenized(
    values: Mapping[str, Any], encoder: PromptEncoder, vocab_size: int, owner: str = ""
) -> Reply:
    """Return the single reply to a request with `tokenize`: the prompt's tokens, and JSON that contains its text.

    The text includes special tokens. The option `spell` adds every token's text. If an input is wrong, raises
    CanvasError, which names it.
    """
    options = _options(values["tokenize"])
    ids = encoder.tokens(values, owner=owner, **{name: options[name] for name in _OPTIONS[:2]})
    foreign = [token for token in ids if not 0 <= token < vocab_size]
    if foreign:
        raise CanvasError(
            f"prompt token {foreign[0]} is not in the vocabulary",
            f"give token ids from 0 to {vocab_size - 1}",
        )
    tokenizer = encoder.tokenizer
    shown: dict[str, Any] = {"text": tokenizer.decode(ids, False) if tokenizer else ""}
    if options["spell"]:
        shown["tokens"] = tokenizer.spell(ids) if tokenizer else []
    return json_reply(Result([], ids, "stop", 0, [], Timings(None, 0.0)), shown)


def _options(text: str) -> dict[str, bool]:
    given = read_object("tokenize", text, 'send {}, or {"add_special_tokens": false}')
    for name, value in given.items():
        if name not in _OPTIONS:
            raise CanvasError(f"tokenize.{name} is unknown", f"give {', '.join(_OPTIONS)}")
        if not isinstance(value, bool):
            raise CanvasError(f"tokenize.{name} is {value!r}", "give true or false")
    return {"add_special_tokens": True, "add_generation_prompt": True, "spell": False, **given}
