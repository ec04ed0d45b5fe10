"""Streams to Triton's decoupled model, which are used again: opening one takes CPU time and a round trip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from canvasrt.containers.client.triton import to_array
from canvasrt.containers.tensors import STREAM_MODEL, inputs_of, outputs_of

MAX_IDLE = 64
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # Triton is on this machine
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_INPUTS = {tensor.name: tensor for tensor in inputs_of(STREAM_MODEL)}
_OUTPUTS = {tensor.name: tensor for tensor in outputs_of(STREAM_MODEL)}
_NUMPY = {"BOOL": "?", "INT32": "<i4", "UINT64": "<u8", "FP32": "<f4"}

Stream = Any  # grpc.aio.StreamStreamCall


class Streams:
    """The streams of one event loop. A stream carries one request at a time."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._idle: list[Stream] = []

    def take(self) -> Stream:
        """Return a stream that is free."""
        while self._idle:
            stream = self._idle.pop()
            if not stream.done():
                return stream
        return self._stub.ModelStreamInfer()

    def give(self, stream: Stream) -> None:
        """Take back a stream whose request has had its last response."""
        if len(self._idle) < MAX_IDLE:
            self._idle.append(stream)
        else:
            stream.cancel()

    async def close(self) -> None:
        """End all streams, and the connection."""
        for stream in self._idle:
            stream.cancel()
        self._idle.clear()
        await self._channel.close()


def encode(inputs: Mapping[str, Any], parameters: Mapping[str, int | str]) -> Any:
    """Return a request to the stream model. `inputs` are values by tensor name; None leaves one
    out. CanvasError for a value that does not fit its type."""
    request = service_pb2.ModelInferRequest(model_name=STREAM_MODEL)
    for name, value in parameters.items():
        if isinstance(value, str):
            request.parameters[name].string_param = value
        else:
            request.parameters[name].int64_param = value
    for name, value in inputs.items():
        if value is None:
            continue
        tensor = _INPUTS[name]
        array = to_array(tensor, value)
        request.inputs.add(name=name, datatype=tensor.datatype, shape=array.shape)
        if tensor.datatype == "BYTES":
            raw = b"".join(len(item).to_bytes(4, "little") + item for item in array)
        else:
            raw = array.tobytes()
        request.raw_input_contents.append(raw)
    return request


def decode(response: Any) -> dict[str, Any]:
    """Return the outputs of one response by name: text, numbers, or lists of them."""
    values: dict[str, Any] = {}
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    for output, raw in pairs:
        tensor = _OUTPUTS[output.name]
        if tensor.datatype == "BYTES":
            items: list[Any] = _texts(raw)
        else:
            items = np.frombuffer(raw, _NUMPY[tensor.datatype]).tolist()
        values[output.name] = items if tensor.shape == (-1,) else items[0]
    return values


def _texts(raw: bytes) -> list[str]:
    texts, begin = [], 0
    while begin < len(raw):
        end = begin + 4 + int.from_bytes(raw[begin : begin + 4], "little")
        texts.append(raw[begin + 4 : end].decode())
        begin = end
    return texts
