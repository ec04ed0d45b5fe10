"""Keeps traced graphs in the cache, because tracing takes seconds and does not depend on the weights' values."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from canvasrt.cache import cache_folder, code_hash, key_of
from canvasrt.extras import version
from canvasrt.graphs import traced

PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript")


def kept(
    module: nn.Module, inputs: Mapping[str, Any], names: list[str], make: Callable[[], ir.Model]
) -> ir.Model:
    """Return the graph that `make` traces. If a module of the same structure was traced before,
    take its graph from the cache.

    Args:
        inputs: example values, whose shapes and dtypes determine the graph.
        names: the names of the graph's inputs and outputs.

    A damaged file is replaced by a new trace. If the cache cannot be written, the trace is not saved.
    """
    made_from = {
        "module": _structure(module),
        "inputs": repr(torch.utils._pytree.tree_map(_form, dict(inputs))),
        "names": names,
        "dtype": str(torch.get_default_dtype()),
        "packages": {each: version(each) for each in PACKAGES},
        "code": code_hash([Path(__file__).parent, Path(traced.__file__)]),
    }
    file = cache_folder() / "traces" / key_of(made_from)
    if (found := _read(file)) is not None:
        return found
    model = make()
    traced.drop_weights(model, dict(module.named_parameters()).keys())
    data = ir.to_proto(model).SerializeToString()
    staged = file.with_name(f".{file.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.write_bytes(hashlib.sha256(data).digest() + data)
            staged.replace(file)
        finally:
            staged.unlink(missing_ok=True)
    return _parsed(data)


def _form(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _structure(module: nn.Module) -> dict[str, Any]:
    """Return everything in a module that determines its graph: classes, settings, weights' shapes, and constants."""
    own = vars(nn.Module()).keys()
    return {
        name: {
            "class": type(each).__qualname__,
            "settings": {key: repr(value) for key, value in vars(each).items() if key not in own},
            "weights": {key: repr(_form(value)) for key, value in each._parameters.items()},
            "constants": {
                key: repr(value.tolist()) for key, value in each.named_buffers(recurse=False)
            },
        }
        for name, each in module.named_modules()
    }


def _read(file: Path) -> ir.Model | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    return _parsed(data[32:]) if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _parsed(data: bytes) -> ir.Model:
    import onnx

    return ir.from_proto(onnx.ModelProto.FromString(data))
