"""Reads the weights of a graph as numbers or codes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from canvasrt.bundle import Bundle
from canvasrt.graphs import lowbits


def weights_of(bundle: Bundle, segment: str = "body_0") -> dict[str, np.ndarray]:
    """Return every weight of a graph: codes as bytes, other weights as float32."""
    graph = ir.load(bundle.path / f"{segment}.onnx").graph
    found = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        raw = np.frombuffer(tensor.tobytes(), np.uint8)
        if tensor.dtype == ir.DataType.FLOAT:
            raw = raw.view(np.float32)
        elif tensor.dtype == ir.DataType.BFLOAT16:
            raw = lowbits.from_bf16(raw.view(np.uint16))
        shape = tensor.shape.numpy()
        packed = name.endswith(".values") and tensor.dtype == ir.DataType.FLOAT4E2M1
        found[name] = raw.reshape((*shape[:-1], shape[-1] // 2) if packed else shape)
    return found
