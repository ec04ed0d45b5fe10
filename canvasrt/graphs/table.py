"""The embedding table in a graph: where its bytes are, and its products in pieces for a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canvasrt.checkpoints.weight_names import TABLE
from canvasrt.graphs.protos import (
    CONTRIB,
    import_contrib,
    integers,
    make_node,
    replace,
    rows_of,
    users,
)

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

TABLE_VALUES, TABLE_SCALE = f"{TABLE}.values", f"{TABLE}.scale"
# A piece in float32 is the memory that a product needs beyond the mapped table: at most these bytes, and in a small
# model at most an eighth of the table. More pieces than needed would cost the sum of their results.
PIECE_BYTES, PIECES, LEAST_BYTES = 1 << 27, 8, 1 << 20


def embedding_entry(file: Path) -> dict[str, Any]:
    """Return the manifest's entry for the embeddings: file, dtype and shape, and for INT8 also where the scales are.

    `file` is the head's graph.
    """
    import onnx_ir as ir

    stored = ir.load(file).graph.initializers
    table = stored[TABLE_VALUES if TABLE_VALUES in stored else TABLE].const_value
    assert isinstance(table, ir.ExternalTensor)
    entry: dict[str, Any] = {
        "file": str(table.location),
        "dtype": table.dtype.numpy().name,
        "shape": [int(size) for size in table.shape.numpy()],
    }
    if TABLE_VALUES in stored:
        scale = stored[TABLE_SCALE].const_value
        assert isinstance(scale, ir.ExternalTensor)
        entry["scale"] = {"dtype": scale.dtype.numpy().name, "offset": int(scale.offset or 0)}
    return entry


def host_head_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry's fields for the host's copy of the head's weights, passed on unchanged."""
    return {"host_head": entry["host_head"]} if "host_head" in entry else {}


def split_table(model: ModelProto) -> bool:
    """Multiply by an INT8 table in pieces, so that it is never whole in float32. Return False without one.

    The graph is edited in place. The pieces are parts of the same bytes. Looked-up rows are dequantized afterwards.
    """
    graph = model.graph
    stored = {item.name: item for item in graph.initializer}
    if TABLE_VALUES not in stored:
        return False
    (wide,) = (each for each in users(graph, TABLE_VALUES) if TABLE_SCALE in each.input)
    for unit in [each for each in users(graph, TABLE_VALUES) if each is not wide]:
        _look_up_first(graph, unit)
    (turned,) = (each for each in users(graph, wide.output[0]) if each.op_type == "Transpose")
    (logits,) = users(graph, turned.output[0])
    (soft,) = (each for each in users(graph, wide.output[0]) if each.op_type == "MatMul")
    pieces = _Pieces(graph, stored[TABLE_VALUES], stored[TABLE_SCALE])
    replace(graph, logits, pieces.turned(logits.input[0], logits.output[0]))
    replace(graph, soft, pieces.straight(soft.input[0], soft.output[0]))
    for each in (turned, wide):
        replace(graph, each, [])
    import_contrib(model)
    return True


class _Pieces:
    """The products with the table, in pieces of its rows."""

    def __init__(self, graph: GraphProto, values: TensorProto, scale: TensorProto) -> None:
        self._graph, self._values, self._scale = graph, values, scale
        tokens, width = values.dims
        size = tokens * width * 4
        count = -(-size // min(PIECE_BYTES, max(LEAST_BYTES, size // PIECES)))
        self._cuts = [tokens * number // count for number in range(count + 1)]

    def turned(self, x: str, output: str) -> list[NodeProto]:
        """Return the nodes for `x` `[…, D]` times the transpose: `[…, V]`."""
        nodes, parts = [], []
        for number, wide in enumerate(self._wide("logits")):
            parts.append(f"{TABLE}/logits_{number}")
            product = _node("FusedMatMul", [x, wide.output[0]], parts[-1], domain=CONTRIB, transB=1)
            nodes += [wide, product]
        return [*nodes, _node("Concat", parts, output, axis=-1)]

    def straight(self, x: str, output: str) -> list[NodeProto]:
        """Return the nodes for `x` `[…, V]` times the table: `[…, D]`."""
        sizes = np.diff(self._cuts)
        self._graph.initializer.append(integers(sizes, f"{TABLE}/sizes"))
        shares = [f"{TABLE}/share_{number}" for number in range(len(sizes))]
        nodes = [make_node("Split", [x, f"{TABLE}/sizes"], shares, f"{TABLE}/split", axis=-1)]
        parts = []
        for number, wide in enumerate(self._wide("soft")):
            parts.append(f"{TABLE}/soft_{number}")
            nodes += [wide, _node("MatMul", [shares[number], wide.output[0]], parts[-1])]
        return [*nodes, _node("Sum", parts, output)]

    def _wide(self, use: str) -> Iterator[NodeProto]:
        """Yield the node that dequantizes each piece. The uses share the codes, which are then mapped once. Each has its
        own scales, or ONNX Runtime would keep the first product's pieces for the second."""
        for number, first in enumerate(self._cuts[:-1]):
            count = self._cuts[number + 1] - first
            codes, scale = f"{TABLE_VALUES}.{number}", f"{TABLE_SCALE}.{use}_{number}"
            self._add(self._values, first, count, codes)
            self._add(self._scale, first, count, scale)
            yield _node("DequantizeLinear", [codes, scale], f"{TABLE}/{use}_wide_{number}", axis=0)

    def _add(self, whole: TensorProto, first: int, count: int, name: str) -> None:
        """Add part of a tensor to the graph, once."""
        if not any(item.name == name for item in self._graph.initializer):
            self._graph.initializer.append(rows_of(whole, first, count, name))


def _look_up_first(graph: GraphProto, unit: NodeProto) -> None:
    """Look rows up before dequantizing them, instead of dequantizing the whole table."""
    (gather,) = users(graph, unit.output[0])
    codes = f"{gather.output[0]}_codes"
    new = [
        _node("Gather", [unit.input[0], gather.input[1]], codes, axis=0),
        _node("DequantizeLinear", [codes, unit.input[1]], gather.output[0]),
    ]
    replace(graph, gather, new)
    replace(graph, unit, [])


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return make_node(kind, inputs, [output], f"{output}_node", **attributes)
