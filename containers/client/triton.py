"""Calls a running server with tritonclient, over HTTP or gRPC."""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Literal

from canvasrt.containers.client.openai import KEY_VARIABLE
from canvasrt.containers.names import LOOPBACK
from canvasrt.containers.ports import Ports, split_url
from canvasrt.containers.tensors import (
    ANSWER_MODEL,
    HINT,
    INPUTS,
    STREAM_MODEL,
    StreamEvent,
    TritonAnswer,
    outputs_of,
)
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require

Protocol = Literal["http", "grpc"]
# Options of a gRPC channel: no proxy, and the limits that tritonclient sets by default.
_DIRECT = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
]
Replies = queue.SimpleQueue[tuple[Any, Any]]  # pairs (result, error); one of the two is None


class Client:
    """A connection to one server, as a context manager.

    url: host:port, with or without http://; None means the protocol's default port on this machine. timeout: seconds
    per call. The API key comes from CANVASRT_API_KEY. Raises UsageError for an invalid url.
    """

    def __init__(
        self,
        url: str | None = None,
        protocol: Protocol = "http",
        timeout: float = ANSWER_TIMEOUT,
        keep_stream: bool = False,
    ) -> None:
        """`keep_stream`: keep the gRPC stream open between requests. This saves a thread and a round trip."""
        self.protocol = protocol
        self.url = _host_and_port(url, protocol)
        self.timeout = timeout
        self._module: ModuleType = require(f"tritonclient.{protocol}", "serve")
        extra: dict[str, Any] = {}
        if protocol == "http":
            extra = {"network_timeout": timeout, "connection_timeout": 10.0}
        elif self.url.rpartition(":")[0].strip("[]") in LOOPBACK:
            extra = {"channel_args": _DIRECT}
        self._client = self._module.InferenceServerClient(self.url, **extra)
        self._keep = keep_stream
        # The queue of replies of an open stream that no request uses; otherwise None.
        self._idle: Replies | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def infer(self, inputs: Mapping[str, Any]) -> TritonAnswer:
        """Return one answer. `inputs` maps tensor names to values; None values are omitted.

        Raises CanvasError if the server is unreachable, the model is missing or not ready, or the reply is an error.
        """
        more: dict[str, Any] = {"client_timeout": self.timeout} if self.protocol == "grpc" else {}
        tensors = make_tensors(self._module, inputs)
        with self._errors(ANSWER_MODEL):
            result = self._client.infer(ANSWER_MODEL, tensors, headers=_headers(), **more)
        return TritonAnswer(**read_reply(result, ANSWER_MODEL))

    def stream(self, inputs: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """Yield the events of one request over gRPC. Leaving the iteration early cancels the request."""
        if self.protocol != "grpc":
            raise UsageError(
                f"Triton does not stream over {self.protocol}", "use grpc, or do not stream"
            )
        end = time.monotonic() + self.timeout
        with self._errors(STREAM_MODEL):
            tensors = make_tensors(self._module, inputs)
            replies = self._sent(tensors)
            finished = False
            try:
                while not finished:
                    result = _taken(replies, max(0.0, end - time.monotonic()))
                    event = StreamEvent(**read_reply(result, STREAM_MODEL))
                    finished = event.event == "final"
                    yield event
            finally:
                if finished and self._keep:
                    self._idle = replies
                else:
                    self._client.stop_stream(cancel_requests=not finished)

    def _sent(self, tensors: list[Any]) -> Replies:
        """Send a request on the open stream or on a new one; return the queue of its replies."""
        kept, self._idle = self._idle, None
        if kept is not None:
            if kept.empty():  # an entry here means that the server has closed the stream
                with contextlib.suppress(self._module.InferenceServerException):
                    self._client.async_stream_infer(STREAM_MODEL, tensors)
                    return kept
            self._client.stop_stream(cancel_requests=True)
        replies: Replies = queue.SimpleQueue()
        self._client.start_stream(
            callback=lambda result, error: replies.put((result, error)), headers=_headers()
        )
        try:
            self._client.async_stream_infer(STREAM_MODEL, tensors)
        except self._module.InferenceServerException:
            # If the connection fails, only the callback receives the reason.
            try:
                with contextlib.suppress(TimeoutError):
                    _taken(replies, timeout=1.0)
                raise
            finally:
                self._client.stop_stream(cancel_requests=True)
        return replies

    @contextlib.contextmanager
    def _errors(self, model: str) -> Iterator[None]:
        """Convert errors of the client libraries to a CanvasError with a hint."""
        from tritonclient.utils import InferenceServerException

        try:
            yield
        except InferenceServerException as error:
            raise self._explained(str(error.message()), str(error.status()), model) from error
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._unreachable(str(error) or type(error).__name__) from error
        except http.client.HTTPException as error:
            raise self._foreign() from error

    def _explained(self, message: str, status: str, model: str) -> CanvasError:
        text = message.lower()
        if "deadline" in text or "deadline_exceeded" in status.lower() or "timed out" in text:
            return self._late()
        foreign = ("unknown request url", "method not allowed", "parsing http/2", "socket closed")
        if any(each in text for each in foreign):
            return self._foreign()
        if "unknown model" in text or "not found" in text:
            return CanvasError(
                f"the server at {self.url} has no model {model!r}",
                "serve a package with `canvasrt serve`, or give another --url",
            )
        if "not ready" in text or "no available versions" in text:
            return CanvasError(f"the model {model!r} at {self.url} is not ready", "try again later")
        if "statuscode.unavailable" in status.lower() and "connect" in text:
            return self._unreachable(message)
        reason, _, hint = message.partition(HINT)
        return CanvasError(f"the server refused the request: {reason}", hint)

    def _late(self) -> CanvasError:
        return CanvasError(
            f"{self.url} did not answer within {self.timeout:g} s", "allow more time with --timeout"
        )

    def _foreign(self) -> CanvasError:
        return CanvasError(
            f"the server at {self.url} does not have Triton's {self.protocol} API",
            f"give Triton's {self.protocol} port ({getattr(Ports(), self.protocol)} by default) with --url; for the OpenAI API, give --protocol openai",
        )

    def _unreachable(self, why: str) -> CanvasError:
        return CanvasError(
            f"no server answers {self.protocol} at {self.url}: {why}",
            "start one with `canvasrt serve`, or give its address with --url",
        )


def _host_and_port(url: str | None, protocol: Protocol) -> str:
    default = Ports().http if protocol == "http" else Ports().grpc
    _, host, port = split_url(
        url or "127.0.0.1", ("http", "grpc"), "give host:port; TLS is not supported"
    )
    return f"[{host}]:{port or default}" if ":" in host else f"{host}:{port or default}"


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def _taken(replies: Replies, timeout: float) -> Any:
    """Return the next result. If an error arrives instead, raises it; if nothing arrives, raises TimeoutError."""
    try:
        result, error = replies.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result


def make_tensors(module: Any, inputs: Mapping[str, Any]) -> list[Any]:
    """Convert values, keyed by tensor name, to input tensors of a tritonclient module. Omits None values.

    Raises CanvasError for a value that does not fit its tensor's type.
    """
    made = []
    for name, value in inputs.items():
        if value is not None:
            array = INPUTS[name].encode(value)
            tensor = module.InferInput(name, list(array.shape), INPUTS[name].datatype)
            tensor.set_data_from_numpy(array)
            made.append(tensor)
    return made


def read_reply(result: Any, model: str) -> dict[str, Any]:
    """Return a reply's outputs, keyed by name. Not every event has every output."""
    arrays = {tensor: result.as_numpy(tensor.name) for tensor in outputs_of(model)}
    return {
        tensor.name: tensor.decode(array) for tensor, array in arrays.items() if array is not None
    }
