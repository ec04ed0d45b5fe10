"""A small set of tokens that can spell any text, sorted in the order in which they are tried to end an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

TURNS = 2.0  # ranks from here up take turns: a rank moves back in the order whenever it is chosen
_QUOTE = 0.5
_FIRST = {b"}": 0.0, b"]": 0.0, b'"': _QUOTE, b",": 1.0, b":": 1.0}
# These characters come first within their rank, because formats such as dates, addresses and URLs need them.
_MARKS = b"@.-/:_+ "
_LATE = 64.0
_PATIENCE = 0.5  # every closing token chosen in a row raises the rank of closing tokens by this
_LETTERS = 3.0
_WORDS = {16: 12, 8: 4, 4: 2}  # length of a word in bytes → number of words to keep


class Spelling(NamedTuple):
    """Token ids, int64 `[n]`, and their ranks `[n]`. To end an answer, tokens of low rank are tried first; tokens of
    equal rank are tried in the array's order."""

    tokens: np.ndarray
    rank: np.ndarray

    def with_special(self, tokens: Collection[int]) -> Spelling:
        """Return the spelling with special tokens added at rank 0, the rank of closing tokens."""
        special = np.array(sorted(tokens), np.int64)
        return Spelling(
            np.concatenate([special, self.tokens]),
            np.concatenate([np.zeros(len(special)), self.rank]),
        )


def spelling_of(found: Sequence[bytes]) -> Spelling:
    """Return the spelling of a vocabulary. `found` has every token's bytes, which are empty for special tokens.

    The spelling contains all single-byte tokens; a few long words, which shorten answers; and for every byte that no
    single-byte token spells, all tokens that contain the byte.
    """
    single = {text[0] for text in found if len(text) == 1}
    missing = bytes(set(range(256)) - single)
    words = _words(found)
    # Of tokens with the same text, the last one is kept.
    by_text = {
        text: token
        for token, text in enumerate(found)
        if len(text) == 1 or token in words or len(text.translate(None, missing)) < len(text)
    }
    kept = by_text.values()
    ranked = sorted((_rank(found[token]), _order(found[token]), token) for token in kept)
    return Spelling(
        np.array([token for _, _, token in ranked], np.int64),
        np.array([rank for rank, _, _ in ranked]),
    )


def _words(found: Sequence[bytes]) -> set[int]:
    """Return some long tokens of lower-case letters, because long tokens shorten answers."""
    kept: dict[int, list[int]] = {length: [] for length in _WORDS}
    for token, text in enumerate(found):
        size = len(text)
        if size in kept and len(kept[size]) < _WORDS[size] and text.isalpha() and text.islower():
            kept[size].append(token)
    return {token for same in kept.values() for token in same}


def _rank(text: bytes) -> float:
    if text in _FIRST:
        return _FIRST[text]
    if text.isdigit():
        return TURNS
    if text.isalpha():
        return _LETTERS
    if any(each in b"{[" or each < 32 or each > 126 for each in text):
        return _LATE
    return 4.0


def _order(text: bytes) -> tuple[int, int]:
    """Return a token's sort key within its rank."""
    known = len(text) == 1 and text in _MARKS
    return (_MARKS.index(text) if known else len(_MARKS), -len(text))


class Speller:
    """Chooses allowed tokens one by one: closing tokens first, then the least used."""

    def __init__(self, spelling: Spelling) -> None:
        self._tokens, self._rank = spelling
        # A sample of letters: if the grammar allows all of them, it allows free text here.
        self._probes = [int(token) for token in self._tokens[self._rank == _LETTERS][::7]]
        self._free, self._bound = _Used(len(self._rank)), _Used(len(self._rank))
        self._last = self._bound

    def moved(self) -> None:
        """Reset counts after the grammar forced tokens."""
        self._free = _Used(len(self._rank))  # counts start over for every free text
        self._bound.closed = 0

    def next(self, allows: Callable[[int], bool]) -> int | None:
        """Return the first allowed token, or None if no token of the spelling is allowed."""
        rank, used = self._rank, self._bound
        if all(map(allows, self._probes)):
            # In free text, brackets close nothing.
            rank, used = np.where((rank < TURNS) & (rank != _QUOTE), _LATE, rank), self._free
        if used is not self._last:
            self._last, used.closed = used, 0
        for place in used.order(rank):
            if allows(token := int(self._tokens[place])):
                used.count(place, float(rank[place]), reset=used is self._bound)
                return token
        return None


class _Used:
    """Counts how often every token and every rank was chosen, and how many closing tokens were chosen in a row."""

    def __init__(self, size: int) -> None:
        self.tokens = np.zeros(size, np.int64)
        self.kinds: dict[float, float] = {}
        self.closed = 0

    def order(self, rank: np.ndarray) -> np.ndarray:
        """Return the indices of all tokens in the order in which to try them."""
        # Closing tokens can repeat forever, so every repetition raises their rank.
        order = np.where(rank < TURNS, rank + _PATIENCE * self.closed, rank)
        for kind, count in self.kinds.items():
            order[rank == kind] += count
        return np.lexsort((self.tokens, order))

    def count(self, place: int, kind: float, reset: bool) -> None:
        self.tokens[place] += 1
        if kind < TURNS:
            self.closed += 1
            return
        self.kinds[kind] = self.kinds.get(kind, 0.0) + kind
        self.closed = 0 if reset else self.closed
