"""Finds the likeliest string of a canvas that a grammar allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.grammar import GrammarState, SlowGrammarError

BEAM, CHOICES = 4, 4
_TOP = 64  # candidates of a position that are looked at before all others
# Only this close to the budget's end does the search see to it that the answer can still end.
_NEAR, _FARTHEST = 32, 192


@dataclass(frozen=True)
class Found:
    """The best string: its tokens, the tokens that could stand at each place, and where it leads.

    `ended`: the string ends the answer with its last token. Padding is not part of it.
    """

    tokens: list[int]
    allowed: list[np.ndarray]
    state: GrammarState
    ended: bool


@dataclass(frozen=True)
class _Path:
    score: float
    tokens: tuple[int, ...]
    states: tuple[GrammarState, ...]
    close: tuple[int, ...] | None = None  # tokens that end the answer, once that is looked after
    ended: bool = False


def near(start: GrammarState) -> int:
    """Return from how many tokens before the budget's end an answer from `start`, a grammar's first
    state, is watched: twice what its shortest one takes."""
    return min(_FARTHEST, max(_NEAR, 2 * start.least))


def search(
    start: GrammarState, scores: np.ndarray, length: int, room: int, near: int, end: int, pad: int
) -> Found | None:
    """Return the best string of at most `length` tokens, by beam search from left to right.

    Args:
        scores: log-probabilities `[canvas, V]` of every token at every place.
        room: tokens that the whole answer may still have, the one that ends it included.
        near: from how many of them on the search sees to it that the answer can still end.
        end, pad: the token that ends the answer, and the one behind it.

    Returns None if the answer cannot end within `room`.
    """
    best = np.argpartition(-scores, min(_TOP, scores.shape[1] - 1), axis=1)[:, :_TOP]
    paths = [_Path(0.0, (), (start,), _close(start, (), room, near))]
    if room <= near and paths[0].close is None:
        return None
    for place in range(length):
        row = scores[place]
        paths = _kept(_grown(paths, row, best[place], end, pad), room - place - 1, near, end)
        if not paths:
            return None
        if all(path.ended for path in paths):
            break
    winner = paths[0]
    places = range(len(winner.tokens))
    allowed = [_with_end(winner.states[place], end) for place in places]
    return Found(list(winner.tokens), allowed, winner.states[-1], winner.ended)


def _grown(
    paths: list[_Path], row: np.ndarray, best: np.ndarray, end: int, pad: int
) -> list[tuple[float, _Path, int | None]]:
    """Return the ways to go on as score, path and token, best first. A path that has ended stays."""
    ways: list[tuple[float, _Path, int | None]] = []
    for path in paths:
        if path.ended:
            ways.append((path.score + float(row[pad]), path, None))
            continue
        state = path.states[-1]
        allowed = state.allowed()
        few = np.intersect1d(best, allowed) if len(allowed) > _TOP else allowed
        few = few if len(few) else allowed
        likely = few[np.argsort(-row[few], kind="stable")][:CHOICES]
        tokens = {int(token) for token in likely}
        if state.accepts:
            tokens.add(end)
        if path.close:
            tokens.add(path.close[0])
        ways += [(path.score + float(row[token]), path, token) for token in sorted(tokens)]
    return sorted(ways, key=lambda way: -way[0])


def _kept(
    ways: list[tuple[float, _Path, int | None]], room: int, near: int, end: int
) -> list[_Path]:
    """Return the best ways that can still end within `room` more tokens."""
    kept: list[_Path] = []
    failed: CanvasError | None = None
    for score, path, token in ways:
        if len(kept) == BEAM:
            break
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
            close = _close(following, path.close or (), room, near)
        except SlowGrammarError:
            raise
        except CanvasError as error:  # such as where the vocabulary cannot spell what must follow
            failed = error
            continue
        if room <= near and (close is None or len(close) + 1 > room):
            continue
        kept.append(_Path(score, tokens, (*path.states, following), close))
    if failed is not None and not kept:
        raise failed
    return kept


def _close(
    state: GrammarState, before: tuple[int, ...], room: int, near: int
) -> tuple[int, ...] | None:
    """Return tokens that end the answer; `before` are those that would have a token earlier."""
    if room > near:
        return None
    # To look for them anew takes a hundred times as long as to check what is known.
    for known in (before[1:], before):
        if before and len(known) < room and state.ends_after(known):
            return known
    found = state.shortest(max(0, room - 1))
    return None if found is None else tuple(found)


def _with_end(state: GrammarState, end: int) -> np.ndarray:
    allowed = state.allowed()
    return np.append(allowed, end) if state.accepts else allowed
