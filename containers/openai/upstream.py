"""Calls Triton's decoupled model over gRPC, and converts its errors to OpenAI's.

Streams are reused, because opening one takes CPU time and a round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from canvasrt.containers.openai.errors import ApiError, bad_request, too_late, too_many, unavailable
from canvasrt.containers.tensors import (
    ANSWER_MODEL,
    ANSWERS,
    ARRIVED,
    ERROR_EVENT,
    ERRORS,
    HINT,
    INPUTS,
    OUTPUTS,
    OWNER,
    STREAM_MODEL,
    StreamEvent,
)

log = logging.getLogger(__name__)

_PROBE = 3.0
# Seconds added to the timeout here, so that the model reports the timeout first.
_GRACE = 1.0
_ABSENT = "unknown model|not ready|no available versions|[Ss]tub process"
MAX_IDLE = 64  # idle streams to keep
CHANNEL = [
    ("grpc.enable_http_proxy", 0),  # Triton runs on this machine
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]

Stream = Any  # grpc.aio.StreamStreamCall


class Source(Protocol):
    """An object that answers requests with events: a Triton server, or a model in this process."""

    def stream(
        self, inputs: Mapping[str, Any], parameters: Mapping[str, int | str] | None = None
    ) -> AsyncGenerator[StreamEvent, None]: ...


class Upstream:
    """A connection to one Triton server. It must be created and used on the same event loop."""

    def __init__(self, address: str, timeout: float | None = None, secret: str = "") -> None:
        """`timeout`: maximum seconds from a request's arrival to the end of its answer. `secret`: a prefix that the
        models require in callers' names."""
        self._secret = secret
        self._timeout = timeout
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._idle: list[Stream] = []  # a stream carries one request at a time

    async def close(self) -> None:
        """End all streams, and the connection."""
        for stream in self._idle:
            stream.cancel()
        self._idle.clear()
        await self._channel.close()

    async def is_ready(self) -> bool:
        """Return whether both models are ready."""
        try:
            for model in (STREAM_MODEL, ANSWER_MODEL):
                asked = service_pb2.ModelReadyRequest(name=model)
                if not (await self._stub.ModelReady(asked, timeout=_PROBE)).ready:
                    return False
        except grpc.aio.AioRpcError:
            return False
        return True

    async def stream(
        self, inputs: Mapping[str, Any], parameters: Mapping[str, int | str] | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events of one request. Closing the iterator cancels the request. Raises ApiError if it fails."""
        parameters = parameters or {}
        owner = {OWNER: f"{self._secret}{parameters[OWNER]}"} if OWNER in parameters else {}
        request = encode(inputs, {ERRORS: 1, **parameters, **owner})
        deadline = self._deadline(parameters)
        stream = self._free_stream()
        last = ""
        try:
            async with asyncio.timeout_at(deadline):
                await stream.write(request)
            while last not in ("final", ERROR_EVENT):
                async with asyncio.timeout_at(deadline):
                    response = await stream.read()
                if response is grpc.aio.EOF:
                    raise await _end_of(stream)
                if response.error_message:
                    raise triton_error("INTERNAL", response.error_message)
                values = decode(response.infer_response)
                last = values["event"]
                if last != ERROR_EVENT:
                    yield StreamEvent(**values)
        except grpc.aio.AioRpcError as error:
            raise triton_error(error.code().name, error.details() or "") from error
        except TimeoutError:  # the model did not report the timeout itself
            raise too_late(self._timeout or 0) from None
        except asyncio.InvalidStateError:  # the stream ended before the request was written
            raise await _end_of(stream) from None
        finally:
            if last in ("final", ERROR_EVENT) and len(self._idle) < MAX_IDLE:
                self._idle.append(stream)
            else:
                stream.cancel()
        if last == ERROR_EVENT:
            failure = json.loads(values["text"])
            raise triton_error(failure["code"], failure["message"])

    def _free_stream(self) -> Stream:
        while self._idle:
            stream = self._idle.pop()
            if not stream.done():
                return stream
        return self._stub.ModelStreamInfer()

    def _deadline(self, parameters: Mapping[str, int | str]) -> float | None:
        """Return a request's deadline, in seconds of the monotonic clock."""
        if self._timeout is None:
            return None
        arrived = parameters.get(ARRIVED)
        begin = arrived / 1e6 if isinstance(arrived, int) else time.monotonic()
        return begin + self._timeout + _GRACE


def encode(inputs: Mapping[str, Any], parameters: Mapping[str, int | str]) -> Any:
    """Return the gRPC message of a request to the decoupled model. `inputs` maps tensor names to values; None values
    are omitted. Raises CanvasError for a value that its tensor's type cannot hold."""
    request = service_pb2.ModelInferRequest(model_name=STREAM_MODEL)
    for name, value in parameters.items():
        if isinstance(value, str):
            request.parameters[name].string_param = value
        else:
            request.parameters[name].int64_param = value
    for name, value in inputs.items():
        if value is not None:
            tensor = INPUTS[name]
            array = tensor.encode(value)
            request.inputs.add(name=name, datatype=tensor.datatype, shape=array.shape)
            request.raw_input_contents.append(tensor.to_wire(array))
    return request


def decode(response: Any) -> dict[str, Any]:
    """Return one response's outputs, keyed by name. They are strings, numbers, or lists of strings or numbers."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: OUTPUTS[output.name].from_wire(raw) for output, raw in pairs}


async def _end_of(stream: Stream) -> ApiError:
    """Return the error for a request whose stream ended before its answer did."""
    code = await stream.code()
    if code is not grpc.StatusCode.OK:
        return triton_error(code.name, await stream.details() or "")
    return unavailable("The request was aborted: the server is stopping.", "stopping")


async def events_of(
    upstream: Source,
    requests: list[dict[str, Any]],
    parameters: Mapping[str, int | str] | None = None,
) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    """Send several requests, and yield pairs of a request's index and an event, as events arrive. Closing the iterator
    cancels the running requests."""
    given: dict[str, int | str] = {**(parameters or {}), ANSWERS: len(requests)}
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def ask(number: int, inputs: dict[str, Any]) -> None:
        try:
            async with contextlib.aclosing(upstream.stream(inputs, given)) as events:
                async for event in events:
                    queue.put_nowait((number, event))
            queue.put_nowait(None)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC also raises CancelledError if this process has cancelled the call.
            queue.put_nowait(triton_error("CANCELLED", "the call was cancelled"))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(ask(*each)) for each in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def triton_error(code: str, details: str) -> ApiError:
    """Return Triton's error as an ApiError. `code` is the name of the error code in Triton or gRPC."""
    message = details.replace(HINT, ": ") if HINT in details else details
    if code in ("INVALID_ARG", "INVALID_ARGUMENT"):
        return _refused(message)
    if code == "RESOURCE_EXHAUSTED":
        return too_many(_sentence(message))
    if code == "DEADLINE_EXCEEDED" and HINT in details:
        return ApiError(504, _sentence(message), code="request_timeout")
    if code == "UNAVAILABLE" and HINT in details:  # from the model itself
        return unavailable(_sentence(message), "overloaded")
    absent = re.search(_ABSENT, details)
    if absent or code in ("UNAVAILABLE", "CANCELLED"):
        log.warning("Triton is unavailable: %s: %s", code, details)
        return unavailable("The model is currently unavailable.", "model_not_ready")
    log.error("Triton failed: %s: %s", code, details)
    return ApiError(500, "The model failed to answer.", code="internal_error")


def _refused(message: str) -> ApiError:
    if "exceed the context" in message:
        return bad_request(_sentence(message), None, "context_length_exceeded")
    # A message about a parameter starts with its name or path, as in "seed is -1".
    named = re.match(r"(?:the )?(\w+(?:\[\d+\]|\.\w+)*)", message)
    return bad_request(_sentence(message), named[1] if named else None, "invalid_value")


def _sentence(text: str) -> str:
    begin = text[:1].upper() if text.startswith(("the ", "a ", "an ")) else text[:1]
    return begin + text[1:] + ("" if text.endswith(".") else ".")
