"""Finds the likeliest tokens that a grammar allows on a canvas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.allowance import Allowance, SlowGrammarError
from canvasrt.runtime.answers.grammar import GrammarState

BEAM, CHOICES = 4, 4
# CPU seconds that each token adds to a search's allowance. Ordinary grammars need up to 4 ms per token with a
# vocabulary of 262,144 tokens.
TOKEN_SECONDS = 0.01
_TOP = 64  # number of likeliest tokens per position that are tried first
# Limits of `near`. Once at most `near` tokens are left, the search checks that the answer can still end.
_NEAR, _FARTHEST = 32, 192


@dataclass(frozen=True)
class Found:
    """The best string: its tokens, the allowed tokens at every position, and the grammar's state after the string.

    `ended`: whether the last token ends the answer. `cut`: whether the answer ends only because no room is left,
    although another token is likelier. `tokens` contains no padding.
    """

    tokens: list[int]
    allowed: list[np.ndarray]
    state: GrammarState
    ended: bool
    cut: bool


@dataclass(frozen=True)
class _Path:
    score: float
    tokens: tuple[int, ...]
    states: tuple[GrammarState, ...]
    # Tokens after which the answer could end; None until at most `near` tokens are left.
    close: tuple[int, ...] | None = None
    ended: bool = False


def near(start: GrammarState) -> int:
    """Return the number of remaining tokens at which the search begins to check that the answer can end: twice the
    length of the shortest answer, within limits. `start` is the grammar's initial state."""
    return min(_FARTHEST, max(_NEAR, 2 * start.least))


def search(
    start: GrammarState,
    scores: np.ndarray,
    length: int,
    room: int,
    near: int,
    end: int,
    pad: int,
    allowance: Allowance,
) -> Found | None:
    """Return the best string of at most `length` tokens, by beam search from left to right.

    Args:
        scores: log-probabilities `[canvas, V]` of every token at every position. room: the number of tokens left for
        the answer, including the token that ends it. near: once at most this many tokens are left, check that the
        answer can still end. end, pad: the token that ends the answer, and the padding token.

    Returns None if the answer cannot end within `room`. Every position adds to the allowance; raises SlowGrammarError
    when the allowance is used up.
    """
    best = np.argpartition(-scores, min(_TOP, scores.shape[1] - 1), axis=1)[:, :_TOP]
    paths = [_Path(0.0, (), (start,), _close(start, (), room, near, allowance))]
    if room <= near and paths[0].close is None:
        return None
    for place in range(length):
        allowance.earn(TOKEN_SECONDS)
        row = scores[place]
        ways = _grown(paths, row, best[place], end, pad, allowance)
        paths = _kept(ways, room - place - 1, near, end, allowance)
        if not paths:
            return None
        if all(path.ended for path in paths):
            break
    winner = paths[0]
    places = range(len(winner.tokens))
    allowed = [_with_end(winner.states[place], end) for place in places]
    likeliest = allowed[-1][scores[len(allowed) - 1, allowed[-1]].argmax()]
    cut = winner.ended and len(allowed) == room and likeliest != end
    return Found(list(winner.tokens), allowed, winner.states[-1], winner.ended, cut)


def _grown(
    paths: list[_Path],
    row: np.ndarray,
    best: np.ndarray,
    end: int,
    pad: int,
    allowance: Allowance,
) -> list[tuple[float, _Path, int | None]]:
    """Return the paths' continuations, best first: score, path, and next token. The token is None for a finished path,
    which continues with padding."""
    ways: list[tuple[float, _Path, int | None]] = []
    for path in paths:
        if path.ended:
            ways.append((path.score + float(row[pad]), path, None))
            continue
        allowance.check()
        state = path.states[-1]
        allowed = state.allowed()
        few = _common(best, allowed) if len(allowed) > _TOP else allowed
        few = few if len(few) else allowed
        likely = few[np.argsort(-row[few], kind="stable")][:CHOICES]
        tokens = {int(token) for token in likely}
        if state.accepts:
            tokens.add(end)
        if path.close:
            tokens.add(path.close[0])
        ways += [(path.score + float(row[token]), path, token) for token in sorted(tokens)]
    return sorted(ways, key=lambda way: -way[0])


def _common(few: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Return the tokens of `few` that are also in `many`, in ascending order. `many` must be ascending."""
    few = np.sort(few)
    return few[many.take(np.searchsorted(many, few), mode="clip") == few]


def _kept(
    ways: list[tuple[float, _Path, int | None]],
    room: int,
    near: int,
    end: int,
    allowance: Allowance,
) -> list[_Path]:
    """Return the best paths that can still end within `room` more tokens."""
    kept: list[_Path] = []
    failed: CanvasError | None = None
    for score, path, token in ways:
        if len(kept) == BEAM:
            break
        allowance.check()
        if token is None:
            kept.append(_Path(score, path.tokens, path.states, None, True))
            continue
        state = path.states[-1]
        tokens = (*path.tokens, token)
        if token == end:
            kept.append(_Path(score, tokens, (*path.states, state), None, True))
            continue
        try:
            following = state.advanced(token)
            close = _close(following, path.close or (), room, near, allowance)
        except SlowGrammarError:
            raise
        except CanvasError as error:  # for example, the vocabulary cannot spell what must follow
            failed = error
            continue
        if room <= near and (close is None or len(close) + 1 > room):
            continue
        kept.append(_Path(score, tokens, (*path.states, following), close))
    if failed is not None and not kept:
        raise failed
    return kept


def _close(
    state: GrammarState, before: tuple[int, ...], room: int, near: int, allowance: Allowance
) -> tuple[int, ...] | None:
    """Return tokens after which the answer can end, or None if `room` exceeds `near` or no such ending is found.
    `before` is the ending that was found one token earlier."""
    if room > near:
        return None
    # Checking the previous ending takes a hundredth of the time of a new search.
    for known in (before[1:], before):
        if before and len(known) < room and state.ends_after(known, allowance):
            return known
    found = state.shortest(max(0, room - 1), allowance)
    return None if found is None else tuple(found)


def _with_end(state: GrammarState, end: int) -> np.ndarray:
    allowed = state.allowed()
    return np.append(allowed, end) if state.accepts else allowed
