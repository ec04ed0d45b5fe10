"""Replies to one request through Triton's Python backend."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

# Exists only inside Triton's Python backend.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

from canvasrt.containers.tensors import ERROR_EVENT, HINT
from canvasrt.containers.triton.decisions import DecisionReplies, InfillReplies
from canvasrt.containers.triton.replies import ReplyBuilder
from canvasrt.containers.triton.tickets import Busy, Late, Overloaded
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.generator import Event

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class ResponseSink:
    """Sends one request's events through its response sender."""

    def __init__(self, sender: Any, error_events: bool) -> None:
        """`error_events` sends an error as an event with its code."""
        self._sender = sender
        self._error_events = error_events
        self._ended = False
        self._ending = threading.Lock()
        self.replies: ReplyBuilder | DecisionReplies | InfillReplies | None = None
        self.cancel: threading.Event | None = None
        self.on_end: Any = None

    def event(self, event: Event) -> None:
        assert self.replies is not None
        if self._ended:  # by a stop string, before the generator finished
            return
        replies = self.replies.replies(event)
        if self.replies.ended and not self._end():
            return
        for number, reply in enumerate(replies, 1):
            tensors = [pb_utils.Tensor(name, array) for name, array in reply.items()]
            last = self._ended and number == len(replies)
            self._sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)
        if self._ended and not replies:
            self._sender.send(flags=FINAL)

    def answer(self, reply: dict[str, np.ndarray]) -> None:
        """Send the one reply to a request that no pass is needed for."""
        if not self._end():
            return
        tensors = [pb_utils.Tensor(name, array) for name, array in reply.items()]
        self._sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL)

    def fail(self, error: BaseException) -> None:
        if not self._end():
            return
        code, message = describe(error)
        if self._error_events:
            failure = json.dumps({"code": code, "message": message}).encode()
            tensors = [
                pb_utils.Tensor("event", np.array([ERROR_EVENT.encode()], object)),
                pb_utils.Tensor("text", np.array([failure], object)),
            ]
            self._sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL)
        else:
            self._sender.send(error_response(code, message), flags=FINAL)

    def cancelled(self) -> bool:
        return (
            self._ended
            or self._sender.is_cancelled()
            or (self.cancel is not None and self.cancel.is_set())
        )

    def _end(self) -> bool:
        """Return whether this call is what ends the request: its time may be over while it is being
        prepared."""
        with self._ending:
            if self._ended:
                return False
            self._ended = True
        if self.on_end is not None:
            self.on_end()
        return True


def describe(error: BaseException) -> tuple[str, str]:
    """Return Triton's code for an error, and a message with its hint."""
    if isinstance(error, CanvasError) and not isinstance(error, EngineError):
        codes = {Busy: "RESOURCE_EXHAUSTED", Late: "DEADLINE_EXCEEDED", Overloaded: "UNAVAILABLE"}
        code = codes.get(type(error), "INVALID_ARG")
        return code, f"{error.message}{HINT}{error.hint}" if error.hint else error.message
    if isinstance(error, EngineError):
        return "INTERNAL", error.message
    return "INTERNAL", f"{type(error).__name__}: {error}"


def error_response(code: str, message: str) -> Any:
    """Return an error reply."""
    codes = pb_utils.TritonError
    # Triton has none of its own for these two.
    code = {"RESOURCE_EXHAUSTED": "UNAVAILABLE", "DEADLINE_EXCEEDED": "CANCELLED"}.get(code, code)
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(message, getattr(codes, code, codes.INTERNAL))
    )
