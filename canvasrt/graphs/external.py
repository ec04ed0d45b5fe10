"""Writes and reads weights of ONNX graphs as external data, in pieces, so that no graph has to fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

# Large weights start on a page boundary, so that a runtime can memory-map them.
PAGE_BYTES, WORD, LARGE_WEIGHT = 4096, 64, 1 << 16
_PIECE = 1 << 26


@dataclass(frozen=True)
class Stored:
    """A weight to write: its name, dtype and shape in the graph, and a function that yields its little-endian bytes in
    pieces."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    read: Callable[[], Iterable[Any]]

    @property
    def size(self) -> int:
        """Size in bytes; two 4-bit numbers share a byte."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return -(-count * self.dtype.bitwidth // 8)


def stored(name: str, dtype: ir.DataType, shape: Iterable[int], data: np.ndarray) -> Stored:
    """Return a weight whose bytes are the array `data`."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return Stored(name, dtype, tuple(shape), lambda: [flat.data])


def from_graph(value: ir.Value) -> Stored:
    """Return an initializer of a loaded graph, to be written again unchanged."""
    tensor = value.const_value
    assert tensor is not None
    shape = tuple(int(size) for size in tensor.shape.numpy())
    return Stored(str(value.name), tensor.dtype, shape, lambda: pieces(tensor))


def pieces(tensor: ir.TensorProtocol) -> Iterator[memoryview]:
    """Yield a tensor's bytes; external data is memory-mapped."""
    if not isinstance(tensor, ir.ExternalTensor):
        yield memoryview(tensor.tobytes())
        return
    data = mapped(tensor)
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE].data


def mapped(tensor: ir.ExternalTensor) -> np.ndarray:
    """Return a tensor's bytes, memory-mapped from its file."""
    size = int(tensor.length if tensor.length is not None else tensor.nbytes)
    return np.memmap(tensor.path, np.uint8, "r", int(tensor.offset or 0), (size,))


def append(
    model: ir.Model,
    weight: Stored,
    out: BinaryIO,
) -> None:
    """Append a weight's bytes to the file `out` and point the graph's initializer at them."""
    out.write(b"\0" * (-out.tell() % (PAGE_BYTES if weight.size >= LARGE_WEIGHT else WORD)))
    offset = out.tell()
    for piece in weight.read():
        out.write(piece)
    length = out.tell() - offset
    assert length == weight.size, (weight.name, length, weight.size)
    value = model.graph.initializers[weight.name]
    value.const_value = ir.ExternalTensor(
        location=Path(out.name).name,
        offset=offset,
        length=length,
        dtype=weight.dtype,
        name=weight.name,
        shape=ir.Shape(weight.shape),
        base_dir=Path(out.name).parent,
    )
    value.dtype, value.shape = weight.dtype, ir.Shape(weight.shape)
