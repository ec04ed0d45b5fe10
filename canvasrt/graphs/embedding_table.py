"""Locates the bytes of a graph's embedding table, and splits multiplications by the table for a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.checkpoints.weight_names import TABLE
from canvasrt.defaults import TABLE_PIECE_BYTES
from canvasrt.graphs.edit import (
    CONTRIB,
    all_outputs,
    drop_unused,
    input_of,
    insert,
    integers,
    part,
    replace,
    sizes_of,
    user,
)
from canvasrt.graphs.names import TABLE_SCALE, TABLE_VALUES

# A small table is split into PIECES pieces, or into fewer if these would be smaller than LEAST_BYTES. (More pieces
# would only add work: the sum of their results.) In a large table, TABLE_PIECE_BYTES limits a piece.
PIECES, LEAST_BYTES = 8, 1 << 20


def embedding_entry(file: Path) -> dict[str, Any]:
    """Return the manifest's entry for the embeddings: file, dtype, shape and, for INT8, the scales' dtype and offset.

    `file` is the head's graph.
    """
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
    """Return the entry's field about the host's copy of the head's weights; empty if the entry has no such field."""
    return {"host_head": entry["host_head"]} if "host_head" in entry else {}


def split_table(model: ir.Model) -> bool:
    """Multiply by an INT8 table in pieces, so that only one piece is in float32 at a time. Return False if there is no
    such table.

    The graph is edited in place. Pieces share the table's bytes. A lookup dequantizes only the rows that it reads.
    """
    stored = model.graph.initializers
    if TABLE_VALUES not in stored:
        return False
    values, scale = stored[TABLE_VALUES], stored[TABLE_SCALE]
    for node in values.consumers():
        if scale not in node.inputs:
            _look_up_first(node)
    (wide,) = (node.outputs[0] for node in values.consumers() if scale in node.inputs)
    logits = user(user(wide, "Transpose").outputs[0], "MatMul")
    soft = user(wide, "MatMul")
    pieces = _Pieces(model.graph, values, scale)
    replace(logits.outputs[0], pieces.multiply_transposed(logits))
    replace(soft.outputs[0], pieces.multiply(soft))
    drop_unused(model)
    model.opset_imports.setdefault(CONTRIB, 1)
    return True


class _Pieces:
    """Multiplies by the table, which is divided into pieces of rows."""

    def __init__(self, graph: ir.Graph, values: ir.Value, scale: ir.Value) -> None:
        self._graph, self._values, self._scale = graph, values, scale
        tokens, self._width = sizes_of(values)
        size = tokens * self._width * 4
        count = -(-size // min(TABLE_PIECE_BYTES, max(LEAST_BYTES, size // PIECES)))
        self._cuts = [tokens * number // count for number in range(count + 1)]
        self._codes = [
            part(graph, values, f"{TABLE_VALUES}.{number}", [last - first, self._width], first)
            for number, (first, last) in enumerate(self._bounds)
        ]

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(zip(self._cuts[:-1], self._cuts[1:], strict=True))

    def multiply_transposed(self, node: ir.Node) -> ir.Value:
        """Return the logits `[…, V]` for the input `[…, D]` of `node`: its products with all pieces, concatenated."""
        parts = [
            insert(
                node,
                "FusedMatMul",
                [input_of(node), wide],
                f"{TABLE}/logits_{number}",
                domain=CONTRIB,
                transB=1,
            )
            for number, wide in enumerate(self._dequantized(node, "logits"))
        ]
        return insert(node, "Concat", parts, f"{TABLE}/logits", axis=-1)

    def multiply(self, node: ir.Node) -> ir.Value:
        """Return the product `[…, D]` of the input `[…, V]` of `node` and the table, as a sum over the pieces."""
        sizes = integers(self._graph, f"{TABLE}/sizes", np.diff(self._cuts))
        names = [f"{TABLE}/share_{number}" for number in range(len(self._codes))]
        shares = all_outputs(insert(node, "Split", [input_of(node), sizes], *names, axis=-1))
        wide = self._dequantized(node, "soft")
        parts = [
            insert(node, "MatMul", [share, each], f"{TABLE}/soft_{number}")
            for number, (share, each) in enumerate(zip(shares, wide, strict=True))
        ]
        return insert(node, "Sum", parts, f"{TABLE}/soft")

    def _dequantized(self, before: ir.Node, use: str) -> Iterator[ir.Value]:
        """Dequantize the pieces one after another, before a node that multiplies by the table.

        The two products share the codes, so the codes are memory-mapped only once. But each product has its own
        initializers for the scales. If scales were shared, ONNX Runtime would keep the first product's dequantized
        pieces for the second.
        """
        for number, (first, last) in enumerate(self._bounds):
            name = f"{TABLE_SCALE}.{use}_{number}"
            scale = part(self._graph, self._scale, name, [last - first], first)
            codes, wide = self._codes[number], f"{TABLE}/{use}_wide_{number}"
            yield insert(before, "DequantizeLinear", [codes, scale], wide, axis=0)


def _look_up_first(dequantize: ir.Node) -> None:
    """Look up rows before dequantizing, instead of dequantizing the whole table."""
    gather = user(dequantize.outputs[0], "Gather")
    rows = gather.outputs[0]
    codes = insert(
        gather,
        "Gather",
        [input_of(dequantize), input_of(gather, 1)],
        f"{rows.name}_codes",
        axis=0,
    )
    wide = insert(gather, "DequantizeLinear", [codes, input_of(dequantize, 1)], f"{rows.name}_wide")
    replace(rows, wide)
