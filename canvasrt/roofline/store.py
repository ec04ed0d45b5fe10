"""Reads and writes an engine's kernel list as gzipped JSON. Equal lists give equal files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canvasrt.errors import CanvasError
from canvasrt.roofline.parse import Kernel, KernelTensor
from canvasrt.types import Json

KERNELS_SUFFIX = ".kernels.json.gz"
KERNELS_SCHEMA = 1
# The kernels of one engine, keyed by profile name.
Programs = Mapping[str, Sequence[Kernel]]


def write_kernels(programs: Programs, file: Path) -> None:
    """Write the kernels of each profile."""
    data = {
        "schema": KERNELS_SCHEMA,
        "programs": {name: [_to_json(k) for k in kernels] for name, kernels in programs.items()},
    }
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    # The timestamp is left out, so that equal lists give equal files.
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(file: Path) -> Programs:
    """Read a kernel list. Raises CanvasError if the file is no kernel list, or has a different schema."""
    try:
        data = json.loads(gzip.decompress(file.read_bytes()))
        if data["schema"] != KERNELS_SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return {name: [*map(_from_json, kernels)] for name, kernels in data["programs"].items()}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CanvasError(
            f"{file} cannot be read as a kernel list: {error}", "build the engines again"
        ) from error


def _to_json(kernel: Kernel) -> Json:
    return {
        "name": kernel.name,
        "kind": kernel.kind,
        "tactic": kernel.tactic,
        "nodes": list(kernel.nodes),
        "in": [_tensor_to_json(each) for each in kernel.inputs],
        "const": [_tensor_to_json(each) for each in kernel.constants],
        "out": [_tensor_to_json(each) for each in kernel.outputs],
    }


def _tensor_to_json(tensor: KernelTensor) -> list[Any]:
    fields = [tensor.name, tensor.dtype, list(tensor.dims)]
    return fields if tensor.read is None else [*fields, tensor.read]


def _from_json(data: Json) -> Kernel:
    inputs, constants, outputs = (
        tuple(map(_tensor_from_json, data[key])) for key in ("in", "const", "out")
    )
    return Kernel(
        data["name"],
        data["kind"],
        inputs,
        constants,
        outputs,
        data["tactic"],
        tuple(data["nodes"]),
    )


def _tensor_from_json(fields: list[Any]) -> KernelTensor:
    name, dtype, dims, *read = fields
    return KernelTensor(name, dtype, tuple(dims), *read)
