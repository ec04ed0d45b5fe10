"""Cuts a growing text before one of some strings, and never shows a part of one too early."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Takes a text in pieces and gives back what is certain to belong to the answer.

    The stop string that is complete first ends the text, and of several that are, the longest. What
    could be the beginning of one is kept back until more is known: so what comes out adds up to the
    same text however it was divided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._kept = ""
        self.found: str | None = None

    def put(self, piece: str, final: bool = False) -> str:
        """What may be shown now. `found` is the stop string that ended the text; all else is dropped."""
        if self.found is not None:
            return ""
        text = self._kept + piece
        ends = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if ends:
            end, _, self.found = min(ends)
            return text[: end - len(self.found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first ones of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
