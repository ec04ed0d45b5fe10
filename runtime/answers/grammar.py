"""Grammars over tokens: JSON schemas, regular expressions and Lark grammars, compiled by llguidance."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.runtime.answers.allowance import EAGER, Allowance, SlowGrammarError
from canvasrt.runtime.answers.rewriting import lark_of, without_unique
from canvasrt.runtime.answers.spelling import Speller, spelling_of
from canvasrt.runtime.tokenizer import Tokenizer

GRAMMAR_TYPES = ("json_schema", "json_object", "regex", "grammar")
# Limits on compiling and following a grammar. llguidance counts steps, not seconds, so every
# machine refuses the same grammars.
LIMITS = {
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
}
MAX_GRAMMAR_BYTES = {"json_schema": 65_536, "json_object": 65_536, "regex": 8192, "grammar": 16_384}
MAX_PATTERNS = 8192  # total bytes of the regular expressions in a schema; their cost is quadratic
MAX_PATTERN_KEYS = 64  # maximum number of `patternProperties`, each of which excludes all others
# Limit on the least common multiple of a schema's `multipleOf` values, after their decimal points are removed.
# llguidance's automaton has as many states as this multiple.
MAX_MULTIPLE = 10_000
# Maximum tokens of a grammar's shortest answer. A grammar whose shortest answer is longer is refused, like a grammar
# without finite answers.
MAX_SHORTEST = 2048
MAX_SECONDS = 1.0  # maximum CPU time to find a grammar's shortest answer


class Vocabulary:
    """The tokens' bytes for llguidance. Building a large vocabulary takes seconds and holds the interpreter's lock."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        size: int,
        ends: tuple[int, ...],
        control: frozenset[int] = frozenset(),
    ) -> None:
        """`control` are the special tokens that grammars can contain."""
        llguidance = require("llguidance", "serve")
        if not ends:
            raise CanvasError(
                "the model has no token that ends an answer, so it cannot follow grammars",
                "leave out the grammar",
            )
        self.size, self.ends = size, ends
        found = [tokenizer.token_bytes(token) for token in range(size)]
        self.special = [token for token, text in enumerate(found) if not text]
        names = [text or b"\xff<%d>" % n for n, text in enumerate(found)]
        wrapped = _Wrapped(ends[0], names, self.special, tokenizer)
        inner = llguidance.TokenizerWrapper(wrapped)
        self.tokenizer = llguidance.LLTokenizer(inner, n_vocab=size)
        # The few tokens that `shortest` tries: trying all tokens would take milliseconds per position.
        self._spelling = spelling_of(
            [b"" if token in ends else text for token, text in enumerate(found)]
        )
        self._allow(control)

    def with_control(self, control: frozenset[int]) -> Vocabulary:
        """Return a copy of the vocabulary for grammars that can contain the special tokens `control`."""
        other = copy.copy(self)
        other._allow(control)
        return other

    def _allow(self, control: frozenset[int]) -> None:
        # In a grammar, only `<[id]>` matches a special token; strings never do.
        self.masked = [token for token in self.special if token not in control]
        self.spelling = self._spelling.with_special(control.difference(self.ends))


@dataclass(frozen=True)
class _Wrapped:
    eos_token_id: int
    tokens: list[bytes]
    special_token_ids: list[int]
    inner: Tokenizer
    bos_token_id: int | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        given = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self.inner.encode_text(given)


class GrammarState:
    """A position in a grammar, after some tokens. Immutable except for `slow`: `advanced` returns a new state.

    slow: whether a search under this grammar took long; only set on the grammar's initial state.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary, least: int = 0) -> None:
        """least: number of tokens of the shortest answer; only known for a grammar's initial state."""
        self._matcher, self._vocabulary, self.least = matcher, vocabulary, least
        self.slow = False
        self._allowed: np.ndarray | None = None

    @property
    def accepts(self) -> bool:
        """Whether the answer can end here."""
        return bool(self._matcher.is_accepting())

    def allowed(self) -> np.ndarray:
        """Return the tokens that can follow, int64, without the token that ends the answer. Raises CanvasError if
        llguidance exceeds a limit."""
        if self._allowed is None:
            self._allowed = self._compute_allowed()
        return self._allowed

    def _compute_allowed(self) -> np.ndarray:
        if self._matcher.is_stopped():
            self._check()
            return np.empty(0, np.int64)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little")[: self._vocabulary.size].astype(bool)
        mask[self._vocabulary.masked] = False
        mask[list(self._vocabulary.ends)] = False
        return np.flatnonzero(mask)

    def forced(self) -> list[int]:
        """Return the next tokens up to the first position where the grammar allows a choice."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def copy(self) -> GrammarState:
        """Return the same state for another thread: two threads must not use one matcher at the same time."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary, self.least)

    def advanced(self, token: int) -> GrammarState:
        """Return the state after an allowed token."""
        matcher = self._matcher.deep_copy()
        matcher.consume_token(int(token))
        following = GrammarState(matcher, self._vocabulary)
        following._check()
        return following

    def ends_after(self, tokens: Sequence[int], allowance: Allowance) -> bool:
        """Return whether these tokens can follow and end the answer."""
        matcher = self._matcher.deep_copy()
        for token in tokens:  # one call for all tokens would hold the interpreter's lock too long
            allowance.check()
            if not matcher.try_consume_tokens([token]):
                return False
        return bool(matcher.is_accepting())

    def shortest(self, most: int, allowance: Allowance) -> list[int] | None:
        """Return at most `most` tokens after which the answer can end, or None if the search finds no such ending.

        The ending is not always the shortest, because the search tries only a few tokens: first tokens that close
        something, then the least used ones. Raises SlowGrammarError if the search takes too long.
        """
        # Tokens that led to dead ends, keyed by the tokens before them.
        wrong: dict[tuple[int, ...], set[int]] = {}
        while True:
            path: list[int] = []
            chosen: list[int] = []  # indices in `path` where other tokens were possible
            try:
                return self._spelled(path, chosen, wrong, most, allowance)
            except SlowGrammarError:
                raise
            except CanvasError:
                # The vocabulary may lack tokens for what must follow. Backtrack to the last choice.
                if not chosen:
                    raise
                wrong.setdefault(tuple(path[: chosen[-1]]), set()).add(path[chosen[-1]])

    def _spelled(
        self,
        path: list[int],
        chosen: list[int],
        wrong: Mapping[tuple[int, ...], set[int]],
        most: int,
        allowance: Allowance,
    ) -> list[int] | None:
        """Extend `path` until the answer can end, and return it. Return None if that needs more than `most` tokens. Add
        to `chosen` the indices of tokens that the grammar did not force."""
        matcher = self._matcher.deep_copy()
        state = GrammarState(matcher, self._vocabulary)
        speller = Speller(self._vocabulary.spelling)
        while not matcher.is_accepting():
            allowance.check()
            forced = state.forced()
            state._check()
            if len(path) + len(forced) > most:
                return None
            if forced:
                path += forced
                speller.moved()
                for each in forced:
                    allowance.check()
                    matcher.consume_token(each)
                state._check()
                continue
            if len(path) >= most:
                return None
            # The speller tests single tokens, because computing all allowed tokens takes 30 ms for some grammars.
            bad = wrong.get(tuple(path), set())
            token = speller.next(partial(_follows, matcher, bad, allowance))
            if token is None:
                choices = np.setdiff1d(state._compute_allowed(), list(bad))
                if not choices.size:
                    raise CanvasError("no token may follow", "simplify it")
                token = int(choices[0])
            chosen.append(len(path))
            path.append(token)
            matcher.consume_token(token)
            state._check()
        return path

    def _check(self) -> None:
        if self._matcher.is_error():
            why = str(self._matcher.get_error()).splitlines()[0][:200]
            why = why.replace("NoExtensionBias", "no token may follow")
            raise CanvasError(f"the grammar cannot be followed: {why}", "simplify it")


def _follows(matcher: Any, bad: Collection[int], allowance: Allowance, token: int) -> bool:
    allowance.check()
    return token not in bad and bool(matcher.validate_tokens([token]))


def compile_grammar(spec: Mapping[str, Any], vocabulary: Vocabulary, path: str) -> GrammarState:
    """Return the initial state of a grammar. `spec` has a `type` and, unless that is `json_object`, the field that the
    type needs: `schema`, `regex` or `grammar`.

    Raises CanvasError, which names `path`, for a grammar that is wrong, too large, unsatisfiable or without finite
    answers.
    """
    llguidance = require("llguidance", "serve")
    path, source = check_grammar(spec, path)
    kind, matcher_type = spec["type"], llguidance.LLMatcher
    try:
        if kind == "regex":
            grammar = matcher_type.grammar_from_regex(source)
        elif kind == "grammar":
            grammar = matcher_type.grammar_from_lark(source)
        else:
            options = {"whitespace_flexible": False}
            grammar = matcher_type.grammar_from_json_schema(source, overrides=options)
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = matcher_type(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
    except (ValueError, TypeError) as error:
        raise CanvasError(f"{path} is not a grammar: {error}", "correct it") from None
    if matcher.is_error():
        why = str(matcher.get_error()).splitlines()[0][:300]
        limit = next((each for each in LIMITS if each.split("_", 1)[1] in why), "")
        named = f"the limit {limit} is {LIMITS[limit]:,}" if limit else "change it"
        if "if regex is empty" in why:
            named = "combining its patterns takes more than llguidance allows: give fewer"
        raise CanvasError(f"{path} cannot be used: {why}", named)
    state = GrammarState(matcher, vocabulary)
    try:
        shortest = state.shortest(MAX_SHORTEST, Allowance(MAX_SECONDS, eager=EAGER))
    except CanvasError as error:
        raise CanvasError(f"{path} cannot be used: {error.message}", error.hint) from None
    if shortest is None:
        raise CanvasError(
            f"{path} allows no answer of at most {MAX_SHORTEST} tokens",
            "give a grammar that has a shorter answer in this model's tokens",
        )
    return GrammarState(matcher, vocabulary, len(shortest))


def check_grammar(spec: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """Return a grammar's path, for error messages, and its text or schema. Compiles nothing.

    Raises CanvasError if the grammar has the wrong form or size.
    """
    kind = spec.get("type")
    if kind not in GRAMMAR_TYPES:
        raise CanvasError(f"{path}.type is {kind!r}", f"give one of {', '.join(GRAMMAR_TYPES)}")
    path, source = _source(spec, path)
    _check_size(source, path, kind)
    # Rewriting can make the grammar larger, so its size is checked again.
    if kind == "json_schema":
        source = without_unique(source, path)
    elif kind == "grammar":
        source = lark_of(source, path)
    _check_size(source, path, kind)
    _check_schemas(source, path)
    return path, source


def _check_size(source: Any, path: str, kind: str) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    # The schemas in a grammar have a limit of their own.
    schemas = re.findall(r"%json .*", text) if kind == "grammar" else []
    inside = sum(len(each.encode()) for each in schemas)
    for part, size in ((kind, len(text.encode()) - inside), ("json_schema", inside)):
        if size > (most := MAX_GRAMMAR_BYTES[part]):
            raise CanvasError(f"{path} has {size} bytes", f"give at most {most} bytes")


def _check_schemas(source: Any, path: str) -> None:
    """Raise CanvasError for too many patterns or too large `multipleOf` values. Both are slow to compile, even in a
    short schema."""
    patterns = keys = 0
    multiple = 1
    left: list[Any] = [source] if isinstance(source, dict) else _schemas_in(source)
    while left:
        part = left.pop()
        if isinstance(part, dict):
            pattern, keyed = part.get("pattern"), part.get("patternProperties")
            patterns += len(pattern.encode()) if isinstance(pattern, str) else 0
            if isinstance(keyed, dict):
                patterns += sum(len(each.encode()) for each in keyed)
                keys += len(keyed)
            multiple = math.lcm(multiple, _divisor(part.get("multipleOf")))
            left += part.values()
        elif isinstance(part, list):
            left += part
    for size, most, what in (
        (patterns, MAX_PATTERNS, "bytes of patterns"),
        (keys, MAX_PATTERN_KEYS, "patternProperties"),
    ):
        if size > most:
            raise CanvasError(f"{path} has {size} {what}", f"give at most {most}")
    if multiple > MAX_MULTIPLE:
        raise CanvasError(
            f"{path} has multipleOf values whose least common multiple exceeds {MAX_MULTIPLE}",
            "give smaller values",
        )


def _schemas_in(text: str) -> list[Any]:
    """Return the JSON schemas in a Lark grammar. Skips unreadable schemas, because llguidance refuses them anyway."""
    found, decoder = [], json.JSONDecoder()
    for match in re.finditer(r"%json\s*", text):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(decoder.raw_decode(text, match.end())[0])
    return found


def _divisor(value: Any) -> int:
    """Return a number without its decimal point, such as 25 for 2.5. Return 1 for any other value, because llguidance
    refuses it anyway."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1
    number = Decimal(repr(value)).normalize()
    numerator, denominator = number.as_integer_ratio()
    scale = 10 ** max(0, -int(number.as_tuple().exponent))
    return max(1, abs(numerator) * scale // denominator)


def _source(spec: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """Return a grammar's path, for error messages, and its text or schema."""
    kind = spec["type"]
    if kind == "json_object":
        return path, {"type": "object"}
    field = "schema" if kind == "json_schema" else kind
    source = spec.get(field)
    wanted = dict if kind == "json_schema" else str
    if not isinstance(source, wanted):
        what = "an object" if wanted is dict else "a string"
        raise CanvasError(f"{path}.{field} is not {what}", f"give {what}")
    return f"{path}.{field}", source
