"""Writes and reads weights of ONNX graphs as external data, in pieces, so that no graph has to fit in memory."""

from __future__ import annotations

import contextlib
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


def load(source: Path) -> tuple[ir.Model, list[Stored], dict[str, str]]:
    """Load a graph. Return the graph, its weights in file order, and weight name → file for weights outside the graph's
    own weight file.

    If any initializer is external data, initializers inside the graph file are constants: they stay there and are not
    returned.
    """
    model = ir.load(source)
    own = source.with_suffix(".bin").name
    stored = sorted(model.graph.initializers.values(), key=_place)
    places = {str(value.name): _place(value)[0] for value in stored}
    apart = {name: place for name, place in places.items() if place and place != own}
    outside = [value for value in stored if places[str(value.name)]]
    return model, [from_graph(value) for value in outside or stored], apart


def _place(value: ir.Value) -> tuple[str, int]:
    """Return an initializer's file and its offset there. The file's name is empty if the graph itself stores the
    data."""
    tensor = value.const_value
    return str(getattr(tensor, "location", "")), int(getattr(tensor, "offset", 0) or 0)


def from_graph(value: ir.Value) -> Stored:
    """Return an initializer of a loaded graph, to be written again unchanged."""
    tensor = value.const_value
    assert tensor is not None
    shape = tuple(tensor.shape.numpy())
    return Stored(str(value.name), tensor.dtype, shape, lambda: pieces(tensor))


def pieces(tensor: ir.TensorProtocol) -> Iterator[memoryview]:
    """Yield a tensor's bytes; external data is memory-mapped."""
    data = mapped(tensor)
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE].data


def mapped(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return a tensor's bytes. External data is memory-mapped, even from a file with several hard links. Bundles have
    such files, and onnx_ir refuses them."""
    if not isinstance(tensor, ir.ExternalTensor):
        return np.frombuffer(tensor.tobytes(), np.uint8)
    size = int(tensor.length if tensor.length is not None else tensor.nbytes)
    return np.memmap(tensor.path, np.uint8, "r", int(tensor.offset or 0), (size,))


def array(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return a tensor as an array of its dtype and shape, memory-mapped as by `mapped`. Its numbers must take whole
    bytes."""
    return mapped(tensor).view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())


def write(model: ir.Model, weights: Iterable[tuple[Stored, str | None]], file: Path) -> None:
    """Write a graph to `file`, and each weight to a file next to it, one after another. A weight comes with its file's
    name, or None for the default file, which is named like `file` but ends with `.bin` and is always written."""
    own = file.with_suffix(".bin").name
    with contextlib.ExitStack() as stack:
        files = {own: stack.enter_context((file.parent / own).open("wb"))}
        for weight, location in weights:
            name = location or own
            if name not in files:
                files[name] = stack.enter_context((file.parent / name).open("wb"))
            _append(model, weight, files[name])
    ir.save(model, file)


def _append(model: ir.Model, weight: Stored, out: BinaryIO) -> None:
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
