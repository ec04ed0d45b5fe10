"""From a torch module to an ONNX graph whose weights are streamed to disk, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from canvasrt.export.checkpoint import bytes_of
from canvasrt.export.weights import Weight

OPSET = 23
# A large weight starts on a page, so that a runtime can map it.
PAGE, WORD, LARGE = 4096, 64, 1 << 16

_DTYPES = {torch.float32: ir.DataType.FLOAT, torch.bfloat16: ir.DataType.BFLOAT16}


def trace(
    module: nn.Module,
    inputs: dict[str, Any],
    dynamic: dict[str, Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> ir.Model:
    """The graph of `module`, weights still placeholders.

    Args: `inputs` example values by argument name of `forward`; `dynamic` the dimension names in the same structure;
    `input_names`, `output_names` the graph's, in flattened order.
    """
    with _quiet():
        program = torch.onnx.export(
            module,
            (),
            kwargs=inputs,
            dynamic_shapes=dynamic,
            input_names=list(input_names),
            output_names=list(output_names),
            opset_version=OPSET,
            dynamo=True,
            # The optimizer merges and renames small weights, which then no longer match the checkpoint's.
            optimize=False,
            verbose=False,
        )
    assert program is not None
    model = program.model
    for node in model.graph.all_nodes():
        # Stack traces of the tracing machine have no place in a reproducible file.
        node.metadata_props.clear()
        node.doc_string = None
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    return model


def write(
    model: ir.Model,
    weights: Sequence[Weight],
    file: Path,
    dtype: torch.dtype,
    own_files: dict[str, str] | None = None,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write `model` to `file`, its weights beside it as external data.

    Args: `own_files` weight name → name of a file of its own, for one that others read too; the rest share
    `file` with the suffix `.bin`. `advance` is told the bytes of each part written.
    """
    own_files = own_files or {}
    shared = file.with_suffix(".bin")
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(shared.open("wb"))
        for weight in weights:
            if name := own_files.get(weight.name):
                with (file.parent / name).open("wb") as own:
                    _attach(model, weight, own, dtype, advance)
            else:
                _attach(model, weight, out, dtype, advance)
    ir.save(model, file)


def _attach(
    model: ir.Model,
    weight: Weight,
    out: Any,
    dtype: torch.dtype,
    advance: Callable[[int], None] | None,
) -> None:
    """Append a weight's bytes to `out` and point the graph's initializer at them."""
    size = math.prod(weight.shape) * dtype.itemsize
    out.write(b"\0" * (-out.tell() % (PAGE if size >= LARGE else WORD)))
    offset = out.tell()
    for part in weight.read(dtype):
        written = out.write(bytes_of(part))
        if advance:
            advance(written)
    model.graph.initializers[weight.name].const_value = ir.ExternalTensor(
        location=Path(out.name).name,
        offset=offset,
        length=out.tell() - offset,
        dtype=_DTYPES[dtype],
        name=weight.name,
        shape=ir.Shape(weight.shape),
        base_dir=Path(out.name).parent,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter: its warnings are about its own internals, and it prints progress of its own."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
