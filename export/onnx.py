"""Exports a torch module to an ONNX graph. Weights are streamed to disk, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from canvasrt.export import trace_cache
from canvasrt.export.checkpoint import bytes_of
from canvasrt.export.weights import Weight
from canvasrt.graphs import external
from canvasrt.graphs.external import Stored
from canvasrt.graphs.traced import clean

OPSET = 23

IR_DTYPES = {torch.float32: ir.DataType.FLOAT, torch.bfloat16: ir.DataType.BFLOAT16}


def trace(
    module: nn.Module,
    inputs: dict[str, Any],
    dynamic: dict[str, Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> ir.Model:
    """Return the graph of `module`, traced now or taken from the cache. The graph has placeholders instead of weights.

    Args:
        inputs: example values by argument name of `forward`.
        dynamic: the names of dynamic dimensions, nested like `inputs`.
        input_names, output_names: names in the graph, in the order of the flattened inputs and outputs.
    """

    def make() -> ir.Model:
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
                # The optimizer would merge and rename small weights, which then would not match the checkpoint.
                optimize=False,
                verbose=False,
            )
        assert program is not None
        clean(program.model)
        return program.model

    return trace_cache.kept(module, inputs, [*input_names, *output_names], make)


def write_graph(
    model: ir.Model,
    weights: Iterable[Weight | Stored],
    file: Path,
    dtype: torch.dtype = torch.float32,
    own_files: Mapping[str, str] | None = None,
) -> None:
    """Write `model` to `file`, and its weights to external files next to it.

    Args:
        weights: the weights in file order. They are read one after another.
        dtype: the dtype in which every `Weight` is written; a `Stored` weight is written unchanged.
        own_files: weight name → the name of a separate file for this weight or its quantized parts. All other weights
        go to one file, which is named like `file` but ends with `.bin`.
    """
    own_files = own_files or {}
    items = (each if isinstance(each, Stored) else _stored(each, dtype) for each in weights)
    external.write(
        model, ((each, own_files.get(each.name.partition(".")[0])) for each in items), file
    )


def _stored(weight: Weight, dtype: torch.dtype) -> Stored:
    def read() -> Iterator[memoryview]:
        return (bytes_of(part) for part in weight.read(dtype))

    return Stored(weight.name, IR_DTYPES[dtype], weight.shape, read)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter, which prints its own progress and warns about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
