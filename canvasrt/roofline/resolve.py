"""Resolves the sizes that the builder prints as −1, by matching kernels' tensors with the graph's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from canvasrt.roofline.dims import UNKNOWN, Dim, fix, times
from canvasrt.roofline.fused_attention import is_attention, operands
from canvasrt.roofline.parse import UNRESOLVED, Kernel, KernelTensor, graph_names
from canvasrt.roofline.tensor_shapes import Dims, Node, Shapes

# Tensor cores read NVFP4's block scales in tiles of 128 rows by 4 blocks, as `[rows/128, 4, 32, blocks/4, 4]`.
_TILE_ROWS = 128
# In the parsed network, the layer that reads attention's operands is named after the graph's node, plus this suffix.
_ATTENTION_INPUTS = "_AttentionInput"


def resolve_sizes(
    kernels: Sequence[Kernel], shapes: Shapes, fixed: Mapping[str, int] | None = None
) -> list[Kernel]:
    """Return the kernels with every −1 replaced: by the size that the graph determines, or else by `dims.UNKNOWN`.

    `fixed` maps the dimensions that have a single size in this profile to that size.
    """
    resolver = _Resolver(shapes, fixed or {})
    for kernel in filter(is_attention, kernels):
        resolver.see_attention(kernel)
    found = [resolver.kernel(kernel) for kernel in kernels]
    # Kernels are resolved twice, because some tensors are recognized only when a later kernel reads them.
    return [resolver.kernel(kernel) for kernel in found]


class _Resolver:
    """Resolves the sizes of one program. `known` has the shapes that were found so far, by tensor name."""

    def __init__(self, shapes: Shapes, fixed: Mapping[str, int]) -> None:
        def plain(dims: Dims) -> Dims:
            return tuple(fix(dim, fixed) for dim in dims)

        self.tensors = {name: plain(dims) for name, dims in shapes.tensors.items()}
        self.nodes = {
            name: Node(
                [(each, plain(dims)) for each, dims in node.inputs],
                [(each, plain(dims)) for each, dims in node.outputs],
                [(each, plain(dims), plain(part)) for each, dims, part in node.taken],
            )
            for name, node in shapes.nodes.items()
        }
        self.known: dict[str, Dims] = {}

    def kernel(self, kernel: Kernel) -> Kernel:
        nodes = [self.nodes[name] for name in kernel.nodes if name in self.nodes]
        read = [dims for node in nodes for _, dims in node.inputs]
        written = [dims for node in reversed(nodes) for _, dims in node.outputs]
        inputs = tuple(self._tensor(each, [*read, *written]) for each in kernel.inputs)
        outputs = tuple(self._tensor(each, [*written, *read]) for each in kernel.outputs)
        taken = _parts_read((*inputs, *kernel.constants), outputs, nodes)
        return replace(
            kernel,
            inputs=tuple(replace(each, read=taken.get(each.name)) for each in inputs),
            constants=tuple(replace(each, read=taken.get(each.name)) for each in kernel.constants),
            outputs=outputs,
        )

    def see_attention(self, kernel: Kernel) -> None:
        """Take the shapes of attention's operands from the graph's node.

        The kernel that writes an operand fuses many nodes, so shapes alone cannot tell cached keys from cached keys
        followed by new ones.
        """
        reading = [f"{name}{_ATTENTION_INPUTS}" for name in kernel.nodes]
        nodes = [self.nodes[name] for name in reading if name in self.nodes]
        for node in nodes:
            if len(node.inputs) != len(kernel.inputs):
                continue
            for operand, tensor in operands(kernel).items():
                _, dims = node.inputs[operand]
                transposed = (*dims[:-2], dims[-1], dims[-2])
                found = closest(tensor.dims, [dims, transposed])
                if found is not None:
                    self.known.setdefault(tensor.name, found)

    def _tensor(self, tensor: KernelTensor, candidates: Iterable[Dims]) -> KernelTensor:
        if not any(dim in (UNRESOLVED, UNKNOWN) for dim in tensor.dims):
            self.known.setdefault(tensor.name, tensor.dims)
            return tensor
        unknown = tuple(UNRESOLVED if dim == UNKNOWN else dim for dim in tensor.dims)
        # The tensor's own shape is the best candidate, followed by the shapes of its kernel's nodes.
        for shapes in (*([each] for each in self._own(tensor)), tuple(candidates)):
            dims = closest(unknown, shapes)
            if dims is not None:
                self.known.setdefault(tensor.name, dims)
                return replace(tensor, dims=dims)
        return replace(tensor, dims=tuple(UNKNOWN if d == UNRESOLVED else d for d in unknown))

    def _own(self, tensor: KernelTensor) -> Iterator[Dims]:
        """Yield the shape that was found for the tensor earlier, and the shape of the graph's tensor of the same
        name."""
        if tensor.name in self.known:
            yield self.known[tensor.name]
        yield from (self.tensors[name] for name in graph_names(tensor.name) if name in self.tensors)


def _parts_read(
    tensors: Sequence[KernelTensor], outputs: Sequence[KernelTensor], nodes: Sequence[Node]
) -> dict[str, str]:
    """Return tensor name → number of elements read, for all tensors that a kernel reads only by gathers and slices."""
    written = {times(each.dims) for each in outputs}
    if any(_is_unknown(size) for size in written):
        return {}
    # A tensor's name in the graph → its size, and the sizes of the parts that gathers and slices take.
    parts: dict[str, tuple[Dim, list[str]]] = {}
    for name, whole, part in (each for node in nodes for each in node.taken):
        size = times(whole)
        source = _source(name, size, nodes, written)
        if source is not None:
            parts.setdefault(source, (size, []))[1].append(str(times(part)))
    found: dict[str, str] = {}
    for source, (size, counts) in parts.items():
        as_large = [] if _is_unknown(size) else [t.name for t in tensors if times(t.dims) == size]
        named = [each for each in as_large if source in graph_names(each)]
        # A tensor that the builder has renamed is recognized by its size, unless a result has the same size.
        likely = named or ([] if size in written else as_large)
        read = next((each for each in likely if each not in found), None)
        if read is not None:
            found[read] = "+".join(counts)
    return found


def _is_unknown(size: Dim) -> bool:
    return UNKNOWN in str(size) or str(UNRESOLVED) in str(size)


def _source(name: str, size: Dim, nodes: Sequence[Node], written: set[Dim]) -> str | None:
    """Return the kernel's input of which `name`, a tensor of `size` elements, is a view.

    A view reshapes its source, or computes each element from one element of the source. Return None if no input or
    several inputs could be the source, if the kernel writes a result of this size, or if the kernel also reads the
    whole tensor.
    """
    writers = {output: node for node in nodes for output, _ in node.outputs}
    views, viewing = [name], []
    while (node := writers.get(views[-1])) is not None:
        seen = {output for output, _ in node.outputs} | set(views)
        same_size = {each for each, dims in node.inputs if times(dims) == size} - seen
        # The source is unknown if no operand or several operands have this size, or if the kernel writes this size.
        if len(same_size) != 1 or size in written:
            return None
        viewing.append(node)
        views.append(same_size.pop())
    for node in nodes:
        read = {each for each, _ in node.inputs} - {each for each, _, _ in node.taken}
        if read & set(views) and node not in viewing:
            return None
    return views[-1]


def closest(wanted: Dims, candidates: Sequence[Dims]) -> Dims | None:
    """Return `wanted` with its −1s filled in from the candidate whose axes match best; None if no candidate fits.

    A sum over tokens, `[1, E, C]`, must not match as a reshape of its operand, `[T, E, C]`.
    """
    known = [each for each in candidates if UNKNOWN not in each]
    reduced = partial(_same_axes, reduced=True)
    for attempt in (_same_axes, _squeezed, _grouped, _permuted, _tiled, reduced, _widened):
        for candidate in known:
            dims = attempt(wanted, candidate)
            if dims is not None:
                return dims
    return None


def _same_axes(wanted: Dims, candidate: Dims, reduced: bool = False) -> Dims | None:
    """Match a candidate with the same axes. If `reduced`, the candidate can have any size where `wanted` has size 1."""
    if len(wanted) != len(candidate):
        return None
    pairs = list(zip(wanted, candidate, strict=True))
    fitting = (
        isinstance(other, str) if size == UNRESOLVED else size == other or (reduced and size == 1)
        for size, other in pairs
    )
    return tuple(o if s == UNRESOLVED else s for s, o in pairs) if all(fitting) else None


def _squeezed(wanted: Dims, candidate: Dims) -> Dims | None:
    """Match a candidate that has the same axes, apart from axes of size 1."""
    found = _same_axes(_without_ones(wanted), _without_ones(candidate))
    if found is None:
        return None
    sizes = iter(found)
    return tuple(1 if dim == 1 else next(sizes) for dim in wanted)


def _without_ones(dims: Dims) -> Dims:
    return tuple(dim for dim in dims if dim != 1)


def _grouped(wanted: Dims, candidate: Dims) -> Dims | None:
    """Match a candidate whose consecutive sizes can be multiplied to give the sizes of `wanted`."""
    if not wanted:
        return () if all(dim == 1 for dim in candidate) else None
    first, rest = wanted[0], wanted[1:]
    if first == 1:
        found = _grouped(rest, candidate)
        return None if found is None else (1, *found)
    for count in range(1, len(candidate) + 1):
        group = times(candidate[:count])
        if group == UNKNOWN or not (
            isinstance(group, str) if first == UNRESOLVED else group == first
        ):
            continue
        found = _grouped(rest, candidate[count:])
        if found is not None:
            return (group, *found)
    return _split(wanted, candidate)


def _split(wanted: Dims, candidate: Dims) -> Dims | None:
    """Match a candidate whose first axis is several axes in `wanted`, such as heads and their width."""
    size = candidate[0] if candidate else 1
    if not isinstance(size, int) or not isinstance(wanted[0], int) or wanted[0] < 2:
        return None
    if size == wanted[0] or size % wanted[0]:
        return None
    found = _grouped(wanted[1:], (size // wanted[0], *candidate[1:]))
    return None if found is None else (wanted[0], *found)


def _permuted(wanted: Dims, candidate: Dims) -> Dims | None:
    """Match a candidate with the same sizes in a different order, if one size of `wanted` is unknown."""
    named = [dim for dim in candidate if isinstance(dim, str)]
    if wanted.count(UNRESOLVED) != 1 or not named:
        return None
    rest = [dim for dim in candidate if isinstance(dim, int) and dim > 1]
    for dim in wanted:
        if dim in (1, UNRESOLVED):
            continue
        if dim not in rest:
            return None
        rest.remove(dim)
    group = times([*named, *rest])
    return (
        None if group == UNKNOWN else tuple(group if dim == UNRESOLVED else dim for dim in wanted)
    )


def _tiled(wanted: Dims, candidate: Dims) -> Dims | None:
    """Match block scales that are `[…, rows, blocks]` in the graph, but in tensor cores' tiles in `wanted`."""
    if len(wanted) < 5 or wanted[-5] != UNRESOLVED or wanted[-4:-2] != (4, 32) or wanted[-1] != 4:
        return None
    before = len(wanted) - 5
    rows = times(candidate[before:-1])
    if wanted[:before] != candidate[:before] or not isinstance(rows, str) or "+" in rows:
        return None
    return None if rows == UNKNOWN else (*wanted[:before], f"{rows}/{_TILE_ROWS}", *wanted[-4:])


def _widened(wanted: Dims, candidate: Dims) -> Dims | None:
    """Match a product's result to which the builder added columns: padding, or the columns of a second product."""
    if not wanted or not candidate:
        return None
    columns, width = wanted[-1], candidate[-1]
    if not (isinstance(columns, int) and isinstance(width, int) and columns > width):
        return None
    found = _grouped(wanted[:-1], candidate[:-1])
    return None if found is None else (*found, columns)
