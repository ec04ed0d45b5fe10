"""Compiles the grammars of requests, and caches the results."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from canvasrt.containers.tensors import MAX_GRAMMAR
from canvasrt.containers.triton.grammar_sandbox import GrammarSandbox
from canvasrt.containers.triton.inputs import read_object
from canvasrt.containers.triton.shared import Shared
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.answers.grammar import (
    GrammarState,
    Vocabulary,
    check_grammar,
    compile_grammar,
)
from canvasrt.runtime.answers.tool_grammar import call_grammar, control_ids
from canvasrt.runtime.model import Model
from canvasrt.runtime.prefix import share_of
from canvasrt.runtime.tokenizer import Tokenizer

_KEPT = 64  # number of compiled grammars to cache
REFUSED_FOR = 60.0  # seconds to cache a refusal; not forever, since a valid grammar can time out on a busy machine
_lock = threading.Lock()  # guards the vocabulary


class _Refusal(NamedTuple):
    """The error for a refused grammar, and the time of the refusal."""

    message: str
    hint: str
    when: float


class _Grammars(NamedTuple):
    """A vocabulary, the special tokens that grammars can contain, and the cached grammars."""

    vocabulary: Vocabulary
    control: frozenset[int]
    known: Shared[GrammarState | _Refusal]


def read_grammar(
    text: str, model: Model, tokenizer: Tokenizer | None, owner: str = ""
) -> GrammarState:
    """Return the initial state of a grammar. Raises CanvasError, which names the mistake, if the grammar is invalid."""
    if tokenizer is None:
        raise CanvasError(
            "the model has no tokenizer, so it cannot follow grammars", "leave out the grammar"
        )
    if len(text) > MAX_GRAMMAR:
        raise CanvasError(f"grammar has {len(text)} characters", f"give at most {MAX_GRAMMAR}")
    spec = read_object("grammar", text, 'send {"type": "json_schema", "schema": {}}')
    control = frozenset[int]()
    if spec.get("type") == "tool_calls":
        control = control_ids(tokenizer)
        spec = {"type": "grammar", "grammar": call_grammar(spec, tokenizer)}
    check_grammar(spec, "grammar")
    config = model.config
    with _lock:
        grammars = _grammars(tokenizer, config.vocab_size, config.eos_token_ids, control)
    # Do not sort keys: their order in a schema is their order in answers.
    return _compiled(json.dumps(spec), grammars, _sandbox_of(model), share_of(owner))


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
    """Build the vocabulary and the sandbox at start. This takes seconds, and would later block all requests."""
    # If the model cannot follow grammars, requests with a grammar are refused later.
    with contextlib.suppress(CanvasError):
        _vocabulary(tokenizer, model.config.vocab_size, model.config.eos_token_ids)
        _sandbox_of(model)


def _sandbox_of(model: Model) -> GrammarSandbox:
    return _sandbox(model.bundle.path, model.config.vocab_size, model.config.eos_token_ids)


@lru_cache(maxsize=1)
def _sandbox(bundle: Path, size: int, ends: tuple[int, ...]) -> GrammarSandbox:
    return GrammarSandbox(bundle, size, ends)


def _compiled(text: str, grammars: _Grammars, sandbox: GrammarSandbox, share: str) -> GrammarState:
    """Return a compiled grammar. Concurrent requests share the compilation; refusals are also cached for some time."""

    def work() -> GrammarState | _Refusal:
        spec = json.loads(text)
        try:
            sandbox.check(spec, grammars.control)
            return compile_grammar(spec, grammars.vocabulary, "grammar")
        except EngineError:  # not the grammar's fault, so do not cache the error
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
