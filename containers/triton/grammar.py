"""Grammars that came as a tensor."""

from __future__ import annotations

import json
import threading
from functools import lru_cache

from canvasrt.containers.tensors import read_object
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.calls import call_grammar, control_ids
from canvasrt.runtime.answers.grammar import GrammarState, Vocabulary, compile_grammar
from canvasrt.runtime.model import Model
from canvasrt.runtime.prefix import share_of
from canvasrt.runtime.tokenizer import Tokenizer

_KEPT = 64  # compiled grammars
_lock = threading.Lock()  # for the vocabulary, which takes a second


def read_grammar(
    text: str, model: Model, tokenizer: Tokenizer | None, owner: str = ""
) -> GrammarState:
    """Return the first state of a grammar. CanvasError names what is wrong with it."""
    if tokenizer is None:
        raise CanvasError(
            "the model has no tokenizer, so it cannot follow grammars", "leave it out"
        )
    spec = read_object("grammar", text, 'send {"type": "json_schema", "schema": {}}')
    control = frozenset[int]()
    if spec.get("type") == "tool_calls":
        control = control_ids(tokenizer)
        spec = {"type": "grammar", "grammar": call_grammar(spec, tokenizer)}
    config = model.config
    with _lock:
        vocabulary = _vocabulary(tokenizer, config.vocab_size, config.eos_token_ids, control)
    # The order of a schema's keys counts: answers have it too.
    return _compiled(json.dumps(spec), vocabulary, share_of(owner))


@lru_cache(maxsize=2)
def _vocabulary(
    tokenizer: Tokenizer, size: int, ends: tuple[int, ...], control: frozenset[int]
) -> Vocabulary:
    return Vocabulary(tokenizer, size, ends, control)


@lru_cache(maxsize=_KEPT)
def _compiled(text: str, vocabulary: Vocabulary, share: str) -> GrammarState:
    return compile_grammar(json.loads(text), vocabulary, "grammar")
