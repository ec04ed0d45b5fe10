"""The sink: a caller always gets an end."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest


class FullMemory:
    """Triton's sender while shared memory has no room for a block."""

    def __init__(self) -> None:
        self.flags: list[Any] = []

    def send(self, response: Any = None, flags: Any = 0) -> None:
        self.flags.append(flags)
        if flags == 0:
            raise RuntimeError("Failed to increase the shared memory pool size")


@pytest.mark.parametrize("ended", [False, True])
def test_a_block_that_cannot_be_sent_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Also if a stop string has ended the answer."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", MagicMock())
    sinks = importlib.import_module("canvasrt.containers.triton.sink")
    sender = FullMemory()
    sink = sinks.ResponseSink(sender, error_events=True)
    sink.replies = MagicMock(ended=ended)
    sink.replies.replies.return_value = [{"event": "block"}] * (1 + ended)
    with pytest.raises(RuntimeError):
        sink.event(object())
    assert sender.flags == [0, sinks.FINAL]
    assert sink.cancelled()
