"""Cuts a growing text before a stop string, and holds back a possible beginning of a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence

from canvasrt.chat_tokens import CALL, CALL_END, CONTROL_TOKENS, THOUGHT, THOUGHT_END

_MARKS = re.compile(f"({'|'.join(map(re.escape, CONTROL_TOKENS))})")
_ENDS = {THOUGHT: THOUGHT_END, CALL: CALL_END}


class StopCutter:
    """Takes a text in pieces and returns the part that certainly belongs to the answer.

    The first complete stop string ends the text; if several end at the same character, the longest one counts. A
    possible beginning of a stop string is held back until more text decides, so the result does not depend on how the
    text is split. With `control`, no control token is split between pieces, and stop strings in thoughts and calls do
    not count.
    """

    def __init__(self, stops: Sequence[str], control: bool = False, opening: str = "") -> None:
        """`opening`: the text before the first piece."""
        self._control = control
        self._until = ""  # the control token that ends the current thought or call
        self._after = False  # whether only spaces have followed a control token
        for mark in _MARKS.findall(opening) if control else ():
            self._pass(mark)
        self._stops = tuple(stops)
        self._borders = {stop: _borders(stop) for stop in self._stops}
        self._kept = ""
        self.found: str | None = None

    def put(self, piece: str, final: bool = False) -> str:
        """Return the text that can be shown now. A stop string that ends the text is stored in `found`; from then on,
        return an empty string."""
        given = ""
        *parts, rest = _MARKS.split(piece) if self._control else [piece]
        for part, mark in zip(parts[::2], parts[1::2], strict=True):
            given += self._cut(part, True)
            if self.found is None:
                given += mark
            self._pass(mark)
        return given + self._cut(rest, final)

    def _pass(self, mark: str) -> None:
        """Enter or leave a thought or call at a control token."""
        self._after = True
        if not self._until:
            self._until = _ENDS.get(mark, "")
        elif mark == self._until:
            self._until = ""

    def _cut(self, piece: str, final: bool) -> str:
        if self.found is not None:
            return ""
        if self._until or (self._after and not piece.strip()):
            return piece
        if self._after:  # spaces after thoughts and calls are syntax
            self._after, rest = False, piece.lstrip()
            return piece[: -len(rest)] + self._cut(rest, final)
        text = self._kept + piece
        ends = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if ends:
            end, _, self.found = min(ends)
            return text[: end - len(self.found)]
        keep = 0
        if not final:
            keep = max((_overlap(text, s, self._borders[s]) for s in self._stops), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def _borders(stop: str) -> list[int]:
    """Return Knuth, Morris and Pratt's failure function: for each prefix of `stop`, the length of its longest proper
    suffix that also begins `stop`."""
    borders, length = [0] * len(stop), 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders


def _overlap(text: str, stop: str, borders: Sequence[int]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`. `text` does not contain `stop`."""
    length = 0
    for character in text[max(0, len(text) - len(stop) + 1) :]:
        while length and character != stop[length]:
            length = borders[length - 1]
        length += character == stop[length]
    return length
