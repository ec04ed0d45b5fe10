"""Rewrites graphs to a form that ONNX Runtime's CUDA provider runs."""

from __future__ import annotations

import onnx_ir as ir

from canvasrt.graphs.edit import input_of, insert


def widen_argmax(model: ir.Model) -> None:
    """Let every ArgMax read float32, because the provider has no ArgMax for bf16. The graph is edited in place."""
    for node in model.graph:
        if node.op_type == "ArgMax":
            x = input_of(node)
            to = int(ir.DataType.FLOAT)
            node.replace_input_with(0, insert(node, "Cast", [x], f"{x.name}.float32", to=to))
