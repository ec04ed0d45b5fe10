"""A proxy in front of Triton's gRPC server, which itself listens on a Unix socket.

The proxy checks API keys, and refuses requests to classify an output. To classify text, Triton would divide by the size
of the text type, 0, and crash.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from canvasrt.containers.openai.auth import Keys, name_of
from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.options import FrontSettings
from canvasrt.containers.openai.upstream import CHANNEL
from canvasrt.containers.tensors import OWNER

_SERVICE = "/inference.GRPCInferenceService/"
_INFER, _STREAM = f"{_SERVICE}ModelInfer", f"{_SERVICE}ModelStreamInfer"
_FINAL = "triton_final_response"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# The compression algorithms, as a bit set: only "none", because a small compressed message could unpack to gigabytes.
_IDENTITY = 1


async def start_grpc_guard(settings: FrontSettings, state: ServerState) -> grpc.aio.Server:
    """Listen on Triton's gRPC port, and return the running server."""
    options = [
        ("grpc.max_receive_message_length", settings.options.max_body),
        ("grpc.max_send_message_length", -1),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY),
    ]
    server = grpc.aio.server(handlers=[_Guard(settings, state)], options=options)
    server.add_insecure_port(settings.grpc_address)
    await server.start()
    return server


class _Guard(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handles every call as a pair of streams, because calls that are not streamed look the same on the wire."""

    def __init__(self, settings: FrontSettings, state: ServerState) -> None:
        self._keys, self._state = Keys(settings.options.keys), state
        self._secret = settings.caller_secret
        self._channel = grpc.aio.insecure_channel(settings.grpc, options=CHANNEL)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, method))

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            caller = self._keys.check(dict(context.invocation_metadata() or ()))
            if (refusal := self._state.refusal()) is not None:
                raise refusal
            exchange = _Exchange(method, self._state, caller, self._secret, context.write)
            upstream = self._channel.stream_stream(method)(timeout=context.time_remaining())
            with contextlib.closing(exchange):
                await exchange.run(requests, upstream)
        except ApiError as error:
            code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
            await context.abort(code, error.message)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")


class _Exchange:
    """The two directions of one call. `caller` is the name of the caller's key, and `secret` is put before
    the name, so that the models trust it. `write` sends a reply to the caller."""

    def __init__(
        self,
        method: str,
        state: ServerState,
        caller: str,
        secret: str,
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._method, self._state = method, state
        self._caller, self._secret, self._write = caller, secret, write
        # One stack for each request whose answer is incomplete.
        self._open: deque[contextlib.ExitStack] = deque()
        self._writing = asyncio.Lock()  # gRPC allows one write at a time

    async def run(self, requests: AsyncIterator[bytes], upstream: Any) -> None:
        """Forward requests and replies until Triton ends the call. Raises ApiError for a refused request, and
        AioRpcError for Triton's errors."""
        sending = asyncio.create_task(self._send(requests, upstream))
        try:
            async for reply in upstream:
                await self._reply(reply)
                if self._open and self._is_last(reply):
                    self._open.popleft().close()
        except asyncio.CancelledError:
            # CancelledError is also raised if `_send` has cancelled the call.
            if sending.done() and not sending.cancelled() and (error := sending.exception()):
                raise error from None
            raise
        finally:
            sending.cancel()
            upstream.cancel()

    def close(self) -> None:
        """Count the requests of this call as finished."""
        for each in self._open:
            each.close()

    async def _reply(self, message: bytes) -> None:
        async with self._writing:
            await self._write(message)

    async def _send(self, requests: AsyncIterator[bytes], upstream: Any) -> None:
        try:
            async for message in requests:
                try:
                    checked = self._check(message)
                except ApiError as error:
                    if self._method != _STREAM:
                        raise
                    # A refused request does not end the stream, which can carry further requests.
                    refusal = service_pb2.ModelStreamInferResponse(error_message=error.message)
                    await self._reply(refusal.SerializeToString())
                    continue
                with contextlib.suppress(asyncio.InvalidStateError):  # Triton has ended the call
                    await upstream.write(checked)
            with contextlib.suppress(asyncio.InvalidStateError):
                await upstream.done_writing()
        except BaseException:
            upstream.cancel()
            raise

    def _check(self, message: bytes) -> bytes:
        """Return the message to forward. The caller's name is added to requests for a model. Raises ApiError for a
        request that must not reach Triton."""
        if self._method not in (_INFER, _STREAM):
            return message
        try:
            request = service_pb2.ModelInferRequest.FromString(message)
        except DecodeError as error:
            raise bad_request(f"The request cannot be read: {error}.") from None
        if any("classification" in each.parameters for each in request.outputs):
            raise bad_request("The outputs cannot be classified.", "classification")
        if (refusal := self._state.refusal()) is not None:
            raise refusal
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._state.callers.one(self._caller))
            stack.enter_context(self._state.working())
            self._open.append(stack.pop_all())
        request.parameters[OWNER].string_param = self._secret + name_of(self._caller)
        return bytes(request.SerializeToString())

    def _is_last(self, message: bytes) -> bool:
        """Return whether a reply ends the answer to a request."""
        if self._method != _STREAM:
            return True
        reply = service_pb2.ModelStreamInferResponse.FromString(message)
        return bool(reply.error_message) or reply.infer_response.parameters[_FINAL].bool_param
