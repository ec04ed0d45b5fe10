"""The shapes of a parsed network's tensors, as formulas of its dynamic dimensions.

The builder prints sizes that depend on the call as −1. The network can compute them once its inputs have sizes, so it
is evaluated at all combinations of two sizes per dimension. Every size is a sum of products of dimensions, so these
samples determine it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from canvasrt.kernels.dims import UNKNOWN, Dim, evaluate, from_terms, names_in

Dims = tuple[Dim, ...]

_NODE = re.compile(r"\[ONNX Layer: (.*?)\]")
# Two sizes of each dimension, neither of which is a size of a real model; the third checks what was found.
_LOW, _HIGH, _CHECK = 3, 4, 7


@dataclass
class Node:
    """A node of the graph: the tensors that it reads and writes, and what its gathers and slices take."""

    inputs: list[tuple[str, Dims]] = field(default_factory=list)
    outputs: list[tuple[str, Dims]] = field(default_factory=list)
    # Per gather or slice: what it reads from, by name, its shape, and the shape of what it takes.
    taken: list[tuple[str, Dims, Dims]] = field(default_factory=list)


@dataclass
class Shapes:
    """Shapes by tensor, and the nodes by name."""

    tensors: dict[str, Dims]
    nodes: dict[str, Node]


def shapes_of(trt: Any, network: Any, profiles: Sequence[Mapping[str, int]]) -> list[Shapes]:
    """Return the shapes once per profile, with the dimensions that the profile fixes as numbers.

    This sets the sizes of the network's inputs, so it cannot be built afterwards. `trt` is the module that parsed it.
    """
    layers = [network.get_layer(number) for number in range(network.num_layers)]
    hidden = _skip_block_quantization(trt, layers)
    tensors = {
        value.name: value
        for layer in layers
        for value in (*_inputs(layer), *_outputs(layer))
        if value.name not in hidden
    }
    inputs = [network.get_input(number) for number in range(network.num_inputs)]
    named = [_named_shape(value) for value in inputs]
    dynamic = {name: value for name, value in tensors.items() if -1 in tuple(value.shape)}
    static = {name: tuple(value.shape) for name, value in tensors.items() if name not in dynamic}
    return [
        _shapes(trt, layers, hidden, static | _sample(inputs, named, dynamic, fixed))
        for fixed in profiles
    ]


def _shapes(
    trt: Any, layers: Sequence[Any], hidden: Mapping[str, str], found: dict[str, Dims]
) -> Shapes:
    for name, source in hidden.items():
        found[name] = found[source]
    nodes: dict[str, Node] = {}
    for layer in layers:
        node = nodes.setdefault(_node_name(layer), Node())
        node.inputs += [(value.name, found[value.name]) for value in _inputs(layer)]
        node.outputs += [(value.name, found[value.name]) for value in _outputs(layer)]
        if layer.type in (trt.LayerType.GATHER, trt.LayerType.SLICE):
            whole, part = layer.get_input(0).name, layer.get_output(0).name
            node.taken.append((whole, found[whole], found[part]))
    return Shapes(found, nodes)


def _skip_block_quantization(trt: Any, layers: Sequence[Any]) -> dict[str, str]:
    """Bypass FP4 block quantization: let readers of a dequantized tensor read the original, which has the same shape.

    With all sizes known, TensorRT-RTX 1.7 fails to infer the dequantized shape ("ScaleMode is illegal"). Returns the
    bypassed tensors, each with its original.
    """
    quantized = {
        layer.get_output(0).name: layer.get_input(0)
        for layer in layers
        if layer.type == trt.LayerType.DYNAMIC_QUANTIZE
    }
    source = {
        layer.get_output(0).name: quantized[layer.get_input(0).name]
        for layer in layers
        if layer.type == trt.LayerType.DEQUANTIZE and layer.get_input(0).name in quantized
    }
    for layer in layers:
        for number in range(layer.num_inputs):
            value = layer.get_input(number)
            if value is not None and value.name in source:
                layer.set_input(number, source[value.name])
    return {name: value.name for name, value in source.items()}


def _sample(
    inputs: Sequence[Any],
    shapes: Sequence[Dims],
    dynamic: Mapping[str, Any],
    fixed: Mapping[str, int],
) -> dict[str, Dims]:
    """Return the shapes of dynamic tensors by name, with `fixed` dimensions as numbers."""
    names = sorted(
        {name for shape in shapes for dim in shape for name in names_in(dim)} - fixed.keys()
    )
    found: dict[str, Dims] = {}
    points = [*product((_LOW, _HIGH), repeat=len(names)), (_CHECK,) * len(names)]
    seen: dict[str, list[tuple[int, ...]]] = {name: [] for name in dynamic}
    for point in points:
        sizes = dict(zip(names, point, strict=True)) | dict(fixed)
        for value, shape in zip(inputs, shapes, strict=True):
            value.shape = [evaluate(dim, sizes) for dim in shape]
        for name, value in dynamic.items():
            seen[name].append(tuple(value.shape))
    check = dict(zip(names, points[-1], strict=True))
    for name, samples in seen.items():
        found[name] = tuple(
            _fit(sizes[:-1], names, sizes[-1], check) for sizes in zip(*samples, strict=True)
        )
    return found


def _named_shape(value: Any) -> Dims:
    return tuple(
        str(value.get_dimension_name(axis)) if size < 0 else size
        for axis, size in enumerate(value.shape)
    )


def _fit(sizes: Sequence[int], names: Sequence[str], last: int, check: Mapping[str, int]) -> Dim:
    """Fit a sum of products of distinct dimensions to the corners' sizes; UNKNOWN unless it is `last` at `check`."""
    factors = list(sizes)
    count = len(names)
    for place in range(count):
        step = 1 << (count - 1 - place)
        for corner in range(len(factors)):
            if corner & step:
                slope = factors[corner] - factors[corner ^ step]
                factors[corner ^ step] -= _LOW * slope
                factors[corner] = slope
    terms = {
        tuple(name for place, name in enumerate(names) if corner >> (count - 1 - place) & 1): factor
        for corner, factor in enumerate(factors)
        if factor
    }
    if any(factor < 0 for factor in terms.values()):
        return UNKNOWN
    dim = from_terms(terms)
    return dim if evaluate(dim, check) == last else UNKNOWN


def _node_name(layer: Any) -> str:
    found = _NODE.search(getattr(layer, "metadata", "") or "")
    return found[1] if found else str(layer.name)


def _inputs(layer: Any) -> Iterator[Any]:
    return (v for i in range(layer.num_inputs) if (v := layer.get_input(i)) is not None)


def _outputs(layer: Any) -> Iterator[Any]:
    return (v for i in range(layer.num_outputs) if (v := layer.get_output(i)) is not None)
