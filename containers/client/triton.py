"""Calls a running server with tritonclient, over HTTP or gRPC."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np

from canvasrt.containers.names import LOOPBACK
from canvasrt.containers.ports import Ports, split_url
from canvasrt.containers.tensors import (
    ANSWER_MODEL,
    HINT,
    STREAM_MODEL,
    Tensor,
    inputs_of,
    outputs_of,
)
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require

Protocol = Literal["http", "grpc"]
Replies = queue.SimpleQueue[tuple[Any, Any]]  # results or errors, from the client's thread
_NUMPY = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BYTES": np.object_,
}


@dataclass(frozen=True)
class TritonAnswer:
    """One answer; its fields are the tensors of the same names."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    steps: list[int]
    seed: int
    cached_tokens: int
    logprobs: str
    block_scores: str = field(default="", kw_only=True)  # only if asked for

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with a key per field."""
        return asdict(self)


@dataclass(frozen=True)
class StreamEvent(TritonAnswer):
    """One event of a stream. `text` and `token_ids` are those of the draft, what the event adds to
    the answer or, in the last event, the whole answer. `canvas` is JSON, empty unless a draft."""

    event: str
    block: int
    step: int
    canvas: str = ""


class Client:
    """A connection to one server, as a context manager.

    url: host:port, with or without http://; None stands for the protocol's default port on this
    machine. UsageError for a bad one. timeout: seconds that one call may take.
    """

    def __init__(
        self,
        url: str | None = None,
        protocol: Protocol = "http",
        timeout: float = ANSWER_TIMEOUT,
        keep_stream: bool = False,
    ) -> None:
        """`keep_stream` leaves the stream of one request open for the next, which saves a thread and
        a round trip. A server that stops then waits for this client."""
        self.protocol = protocol
        self.url = _host_and_port(url, protocol)
        self.timeout = timeout
        self._module: ModuleType = require(f"tritonclient.{protocol}", "serve")
        extra: dict[str, Any] = {}
        if protocol == "http":
            extra = {"network_timeout": timeout, "connection_timeout": 10.0}
        elif self.url.rpartition(":")[0].strip("[]") in LOOPBACK:
            extra = {"channel_args": direct_channel()}
        self._client = self._module.InferenceServerClient(self.url, **extra)
        self._keep = keep_stream
        # Where the replies of an open stream without a request arrive.
        self._idle: Replies | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def infer(self, inputs: Mapping[str, Any]) -> TritonAnswer:
        """Return one answer. `inputs` are values by tensor name; None leaves one out.

        CanvasError for an unreachable server, a missing or unready model, or an error reply.
        """
        timeout = {"client_timeout": self.timeout} if self.protocol == "grpc" else {}
        with self._errors(ANSWER_MODEL):
            result = self._client.infer(
                ANSWER_MODEL, make_tensors(self._module, ANSWER_MODEL, inputs), **timeout
            )
        return TritonAnswer(**read_reply(result, ANSWER_MODEL))

    def stream(self, inputs: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """Yield the events of one request, over gRPC. Leaving the iteration early cancels the
        request."""
        if self.protocol != "grpc":
            raise UsageError(
                f"Triton does not stream over {self.protocol}", "use grpc, or do not stream"
            )
        end = time.monotonic() + self.timeout
        with self._errors(STREAM_MODEL):
            tensors = make_tensors(self._module, STREAM_MODEL, inputs)
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
        """Send a request on the open stream, or on a new one; return where its replies arrive."""
        kept, self._idle = self._idle, None
        if kept is not None:
            if kept.empty():  # otherwise the server has ended it
                with contextlib.suppress(self._module.InferenceServerException):
                    self._client.async_stream_infer(STREAM_MODEL, tensors)
                    return kept
            self._client.stop_stream(cancel_requests=True)
        replies: Replies = queue.SimpleQueue()
        self._client.start_stream(callback=lambda result, error: replies.put((result, error)))
        try:
            self._client.async_stream_infer(STREAM_MODEL, tensors)
        except self._module.InferenceServerException:
            # When the connection fails, only the callback gets the reason.
            try:
                with contextlib.suppress(TimeoutError):
                    _taken(replies, timeout=1.0)
                raise
            finally:
                self._client.stop_stream(cancel_requests=True)
        return replies

    @contextlib.contextmanager
    def _errors(self, model: str) -> Iterator[None]:
        """Turn errors of the client libraries into a CanvasError that says what to do."""
        from tritonclient.utils import InferenceServerException

        try:
            yield
        except InferenceServerException as error:
            raise self._explained(str(error.message()), str(error.status()), model) from error
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._unreachable(str(error) or type(error).__name__) from error

    def _explained(self, message: str, status: str, model: str) -> CanvasError:
        text = message.lower()
        if "deadline" in text or "deadline_exceeded" in status.lower() or "timed out" in text:
            return self._late()
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


def direct_channel() -> list[tuple[str, int]]:
    """Return the options of a gRPC channel that uses no proxy, with tritonclient's own limits."""
    limits = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    return [("grpc.enable_http_proxy", 0), *((name, 2**31 - 1) for name in limits)]


def _taken(replies: Replies, timeout: float) -> Any:
    """Return the next result, or raise the error that came instead; TimeoutError if none came."""
    try:
        result, error = replies.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result


def make_tensors(module: Any, model: str, inputs: Mapping[str, Any]) -> list[Any]:
    """Return values by name as input tensors of a client module; None leaves one out.

    CanvasError for a value that does not fit its type.
    """
    known = {tensor.name: tensor for tensor in inputs_of(model)}
    made = []
    for name, value in inputs.items():
        if value is not None:
            array = to_array(known[name], value)
            tensor = module.InferInput(name, list(array.shape), known[name].datatype)
            tensor.set_data_from_numpy(array)
            made.append(tensor)
    return made


def to_array(tensor: Tensor, value: Any) -> np.ndarray:
    """Return a value as the array of a tensor. CanvasError if it does not fit the type."""
    if tensor.datatype == "BYTES":
        texts = value if tensor.shape == (-1,) else [value]
        # NumPy would cut zeros off the ends of bytes, were they not objects.
        files = [each if isinstance(each, bytes) else str(each).encode() for each in texts]
        return np.array(files, np.object_)
    values = value if tensor.shape == (-1,) else [value]
    try:
        array = np.array(values)
        made = array.astype(_NUMPY[tensor.datatype])
        whole = tensor.datatype == "FP32" or array.size == 0 or np.array_equal(array, made)
    except (OverflowError, ValueError, TypeError):
        whole = False
    if not whole:
        raise CanvasError(
            f"{tensor.name} {value!r} does not fit its type, {tensor.datatype}",
            f"give another value for {tensor.name}",
        )
    return made


def read_reply(result: Any, model: str) -> dict[str, Any]:
    """Return a reply's outputs by name."""
    values: dict[str, Any] = {}
    for tensor in outputs_of(model):
        array = result.as_numpy(tensor.name)
        if array is None:  # only some events have it
            continue
        if tensor.shape == (-1,):
            values[tensor.name] = [int(item) for item in array]
        elif tensor.datatype == "BYTES":
            values[tensor.name] = bytes(array[0]).decode()
        else:
            values[tensor.name] = int(array[0])
    return values
