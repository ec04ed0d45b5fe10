"""The shapes of a parsed network's tensors, as formulas of its dynamic dimensions.

The builder prints sizes that depend on the call as −1. TensorRT can compute them when the network's inputs have sizes,
so two sizes per dimension are tried, in all combinations. Every size is a sum of products of dimensions, so these
samples determine its formula.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from canvasrt.roofline.dims import UNKNOWN, Dim, evaluate, from_terms, names_in

Dims = tuple[Dim, ...]

_NODE = re.compile(r"\[ONNX Layer: (.*?)\]")
# Two sizes to try for every dimension, and a third size to check the formula. They do not occur in real models.
_LOW, _HIGH, _CHECK = 3, 4, 7


@dataclass
class Node:
    """A node of the graph: the tensors that it reads and writes, and the parts that its gathers and slices take."""

    inputs: list[tuple[str, Dims]] = field(default_factory=list)
    outputs: list[tuple[str, Dims]] = field(default_factory=list)
    # For each gather or slice: its source's name, the source's shape, and the shape of the part that it reads.
    taken: list[tuple[str, Dims, Dims]] = field(default_factory=list)


@dataclass
class Shapes:
    """The tensors' shapes, and the nodes; both are keyed by name."""

    tensors: dict[str, Dims]
    nodes: dict[str, Node]


def shapes_of(trt: Any, network: Any, profiles: Sequence[Mapping[str, int]]) -> list[Shapes]:
    """Return the shapes for every profile. Dimensions that a profile fixes become numbers.

    Sets the sizes of the network's inputs, so the network cannot be built afterwards. `trt` is the module that parsed
    the network.
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
    named = [
        tuple(value.get_dimension_name(i) if n < 0 else n for i, n in enumerate(value.shape))
        for value in inputs
    ]
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

    When all sizes are known, TensorRT-RTX 1.7 fails to infer the dequantized shape ("ScaleMode is illegal"). Returns
    the original's name for every bypassed tensor.
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
    """Return the shapes of dynamic tensors by name. `fixed` dimensions become numbers."""
    dims = sorted({each for shape in shapes for dim in shape for each in names_in(dim)} - {*fixed})
    seen: dict[str, list[tuple[int, ...]]] = {name: [] for name in dynamic}
    for point in (*product((_LOW, _HIGH), repeat=len(dims)), (_CHECK,) * len(dims)):
        sizes = dict(zip(dims, point, strict=True)) | dict(fixed)
        for value, shape in zip(inputs, shapes, strict=True):
            value.shape = [evaluate(dim, sizes) for dim in shape]
        for name, value in dynamic.items():
            seen[name].append(tuple(value.shape))
    # Cached, because thousands of tensors have only a few different sizes.
    formulas: dict[tuple[int, ...], Dim] = {}

    def formula(sizes: tuple[int, ...]) -> Dim:
        if sizes not in formulas:
            formulas[sizes] = _formula(dims, sizes[:-1], sizes[-1])
        return formulas[sizes]

    return {name: tuple(map(formula, zip(*samples, strict=True))) for name, samples in seen.items()}


def _formula(dims: Sequence[str], sizes: Sequence[int], check: int) -> Dim:
    """Return the sum of products of distinct `dims` that has the values `sizes` at all combinations of `_LOW` and
    `_HIGH`. In `sizes`, the last dimension changes fastest. Return UNKNOWN if a coefficient is negative, or if the sum
    is not `check` when all dimensions are `_CHECK`."""
    terms = {
        tuple(dim for dim, is_factor in zip(dims, chosen, strict=True) if is_factor): factor
        for chosen, factor in _coefficients(list(sizes), len(dims)).items()
        if factor
    }
    if any(factor < 0 for factor in terms.values()):
        return UNKNOWN
    formula = from_terms(terms)
    return formula if evaluate(formula, dict.fromkeys(dims, _CHECK)) == check else UNKNOWN


def _coefficients(sizes: list[int], count: int) -> dict[tuple[bool, ...], int]:
    """Return the coefficients of a polynomial in `count` dimensions. A key says which dimensions the term multiplies.

    The polynomial is linear in every dimension. So its values at `_LOW` and `_HIGH` determine a slope and a value at 0,
    which are polynomials in the other dimensions."""
    if not count:
        return {(): sizes[0]}
    half = len(sizes) // 2
    pairs = list(zip(sizes[:half], sizes[half:], strict=True))
    slopes = [(high - low) // (_HIGH - _LOW) for low, high in pairs]
    at_zero = [low - _LOW * slope for (low, _), slope in zip(pairs, slopes, strict=True)]
    found = {(False, *rest): n for rest, n in _coefficients(at_zero, count - 1).items()}
    return found | {(True, *rest): n for rest, n in _coefficients(slopes, count - 1).items()}


def _node_name(layer: Any) -> str:
    found = _NODE.search(getattr(layer, "metadata", "") or "")
    return found[1] if found else str(layer.name)


def _inputs(layer: Any) -> Iterator[Any]:
    return (v for i in range(layer.num_inputs) if (v := layer.get_input(i)) is not None)


def _outputs(layer: Any) -> Iterator[Any]:
    return (v for i in range(layer.num_outputs) if (v := layer.get_output(i)) is not None)
