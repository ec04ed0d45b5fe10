"""Cuts a growing text before a stop string, and holds back a possible beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Takes a text in pieces and returns the part that certainly belongs to the answer.

    The first complete stop string ends the text; if several end at the same character, the longest one counts. A
    possible beginning of a stop string is held back until more text decides, so the result does not depend on how the
    text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = {stop: _borders(stop) for stop in self._stops}
        self._kept = ""
        self.found: str | None = None

    def put(self, piece: str, final: bool = False) -> str:
        """Return the text that can be shown now. A stop string that ends the text is stored in `found`; from then on,
        return an empty string."""
        if self.found is not None:
            return ""
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
