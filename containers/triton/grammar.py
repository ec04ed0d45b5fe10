"""Grammars that came as a tensor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from canvasrt.containers.tensors import read_object
from canvasrt.containers.triton.shared import Shared
from canvasrt.containers.triton.trials import Trials
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.answers.grammar import GrammarState, Vocabulary, compile_grammar
from canvasrt.runtime.answers.tool_grammar import call_grammar, control_ids
from canvasrt.runtime.model import Model
from canvasrt.runtime.prefix import share_of
from canvasrt.runtime.tokenizer import Tokenizer

_KEPT = 64  # compiled grammars
REFUSED_FOR = 60.0  # seconds: a limit of time may have been reached because the machine was busy
_lock = threading.Lock()  # for the vocabulary


class _Refusal(NamedTuple):
    """Why a grammar cannot be used, and when that was found."""

    message: str
    hint: str
    when: float


class _Grammars(NamedTuple):
    """A vocabulary, the special tokens that grammars may have, and the newest grammars over it."""

    vocabulary: Vocabulary
    control: frozenset[int]
    known: Shared[GrammarState | _Refusal]


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
        grammars = _grammars(tokenizer, config.vocab_size, config.eos_token_ids, control)
    # The order of a schema's keys counts: answers have it too.
    return _compiled(json.dumps(spec), grammars, _trials_of(model), share_of(owner))


@lru_cache(maxsize=2)
def _grammars(
    tokenizer: Tokenizer, size: int, ends: tuple[int, ...], control: frozenset[int]
) -> _Grammars:
    vocabulary = _vocabulary(tokenizer, size, ends).with_control(control)
    return _Grammars(vocabulary, control, Shared(_KEPT, _KEPT, lambda _: 1))


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: Tokenizer, size: int, ends: tuple[int, ...]) -> Vocabulary:
    return Vocabulary(tokenizer, size, ends)


def prepare_grammars(model: Model, tokenizer: Tokenizer) -> None:
    """Do what takes seconds, and would hold up everybody, before the first grammar comes."""
    # If the model cannot follow grammars, whoever sends one is told.
    with contextlib.suppress(CanvasError):
        _vocabulary(tokenizer, model.config.vocab_size, model.config.eos_token_ids)
        _trials_of(model)


def _trials_of(model: Model) -> Trials:
    if model.bundle is None:
        raise CanvasError("the model was not opened from a bundle", "open a bundle")
    return _trials(model.bundle.path, model.config.vocab_size, model.config.eos_token_ids)


@lru_cache(maxsize=1)
def _trials(bundle: Path, size: int, ends: tuple[int, ...]) -> Trials:
    return Trials(bundle, size, ends)


def _compiled(text: str, grammars: _Grammars, trials: Trials, share: str) -> GrammarState:
    """Return a grammar, compiled once for all who ask for it; refusals are kept for a while, too."""

    def work() -> GrammarState | _Refusal:
        spec = json.loads(text)
        try:
            trials.check(spec, grammars.control)
            return compile_grammar(spec, grammars.vocabulary, "grammar")
        except EngineError:  # the grammar is not at fault
            raise
        except CanvasError as error:
            return _Refusal(error.message, error.hint, time.monotonic())

    key = hashlib.sha256(f"{len(share)} {share}{text}".encode()).digest()
    found = grammars.known.get(key, work)
    if isinstance(found, _Refusal) and time.monotonic() - found.when > REFUSED_FOR:
        grammars.known.drop(key, found)
        found = grammars.known.get(key, work)
    if isinstance(found, _Refusal):
        raise CanvasError(found.message, found.hint)
    return found
