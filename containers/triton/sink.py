"""Sends one request's replies through Triton's Python backend."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any

# Exists only inside Triton's Python backend.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

from canvasrt.containers.tensors import ERROR_EVENT, OUTPUTS
from canvasrt.containers.triton.tickets import describe

if TYPE_CHECKING:  # not imported at run time, because the answer model's process needs no engines
    from canvasrt.containers.triton.replies import Replies, Reply
    from canvasrt.runtime.request import Event

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LARGE = 2**20  # characters and numbers of a reply
# The answer model adds this parameter to its calls of the decoupled model. Calls between models lose error codes, so
# errors are returned as events.
CALL_PARAMETER = "triton_canvasrt_call"


class ResponseSink:
    """Sends one request's replies through its response sender."""

    def __init__(self, sender: Any, error_events: bool) -> None:
        """`error_events`: whether an error is sent as an event that contains its code."""
        self._sender = sender
        self._error_events = error_events
        self._ended = False
        self._ending = threading.Lock()
        self.replies: Replies | None = None
        self.cancel: threading.Event | None = None
        self.on_end: Callable[[], Any] = lambda: None

    def event(self, event: Event) -> None:
        assert self.replies is not None
        if self._ended:  # a stop string ended the answer before the generator did
            return
        try:
            replies = self.replies.replies(event)
        except BaseException as error:  # otherwise the caller would wait forever
            self.fail(error)
            raise
        last = self.replies.ended
        if not last or self._end():
            self._send(replies, last)

    def answer(self, reply: Reply) -> None:
        """Send the single reply of a request that needs no pass."""
        if self._end():
            self._send([reply], last=True)

    def fail(self, error: BaseException) -> None:
        """Send an error, unless the request has ended."""
        if self._end():
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        code, message = describe(error)
        if self._error_events:
            failure = json.dumps({"code": code, "message": message})
            self._sender.send(_response({"event": ERROR_EVENT, "text": failure}), flags=FINAL)
        else:
            self._sender.send(error_response(code, message), flags=FINAL)

    def cancelled(self) -> bool:
        """Return whether the request needs no more events, because it has ended or its caller has left."""
        told = self.cancel is not None and self.cancel.is_set()
        return self._ended or self._sender.is_cancelled() or told

    def _send(self, replies: Sequence[Reply], last: bool) -> None:
        """Send replies; if they are the `last`, also the flag FINAL. A large reply is sent before the flag, not with it:
        sending the flag closes the sender even if shared memory is full, and then an error cannot be sent either."""
        apart = not replies or sum(map(_size, replies[-1].values())) > LARGE
        flags = 0
        try:
            responses = [_response(reply) for reply in replies]
            for number, response in enumerate(responses, 1):
                flags = FINAL if last and not apart and number == len(responses) else 0
                self._sender.send(response, flags=flags)
        except BaseException as error:
            if flags == 0 and (last or self._end()):
                self._tell(error)
            raise
        if last and apart:
            self._sender.send(flags=FINAL)

    def _end(self) -> bool:
        """End the request unless it has ended. Return whether this call ended it: a timeout on another thread may
        have ended it first."""
        with self._ending:
            if self._ended:
                return False
            self._ended = True
        self.on_end()
        return True


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _response(reply: Reply) -> Any:
    tensors = [pb_utils.Tensor(name, OUTPUTS[name].encode(value)) for name, value in reply.items()]
    return pb_utils.InferenceResponse(tensors)


def error_response(code: str, message: str) -> Any:
    """Return an error reply."""
    codes = pb_utils.TritonError
    # Triton has no codes for these two.
    code = {"RESOURCE_EXHAUSTED": "UNAVAILABLE", "DEADLINE_EXCEEDED": "CANCELLED"}.get(code, code)
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(message, getattr(codes, code, codes.INTERNAL))
    )
