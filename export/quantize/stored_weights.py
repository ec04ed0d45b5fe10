"""Reads the network's weights from a checkpoint or a graph bundle, piece by piece, and the embedding table by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.checkpoints.weight_names import TABLE, global_name
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.segments import SegmentModule, segments
from canvasrt.export.weights import check_finite, weights
from canvasrt.runtime.bundle_facts import map_table

_PIECE = 1 << 24  # bytes
_DTYPES = {ir.DataType.FLOAT: torch.float32, ir.DataType.BFLOAT16: torch.bfloat16}


class CheckpointWeights:
    """The weights of a checkpoint, rounded to `dtype`, the dtype in which graphs store experts and table. `held` has,
    by global name, the weights that the checkpoint stores quantized."""

    def __init__(
        self,
        source: Checkpoint,
        config: ModelConfig,
        sampler: SamplerDefaults,
        dtype: torch.dtype,
        held: Mapping[str, Any],
    ) -> None:
        self.config, self.sampler, self.dtype = config, sampler, dtype
        self._source, self._held = source, held
        self._weights = {
            global_name(part.name, part.layers, each.name): each
            for part in segments(config, 1)
            for each in weights(part.module, part.sources, source)
        }

    def read(self, part: SegmentModule, local: str, check: bool) -> Iterator[Tensor]:
        """Yield a weight's numbers in order. If `check` is true, raise CanvasError for a number that is not finite."""
        name = global_name(part.name, part.layers, local)
        if name in self._held:
            return (each.to(self.dtype) for each in self._held[name].wide())
        return self._weights[name].read(self.dtype, check)

    def embeddings(self, tokens: np.ndarray) -> Tensor:
        """Return rows of the embedding table, float32 `[n, D]`."""
        (table,) = self._weights[TABLE].parts
        return self._source.rows(table, tokens).to(self.dtype).to(torch.float32)


class StoredWeights:
    """The weights of the plain graphs in a bundle. Files are read, not mapped, so that no weight stays in memory."""

    def __init__(self, graphs: Bundle) -> None:
        manifest = graphs.manifest
        self.config, self.sampler = manifest.model, manifest.sampler
        self._tensors: dict[str, ir.ExternalTensor] = {}
        for entry in manifest.segments:
            if entry["name"] != "head" and "layers" not in entry:
                continue
            for local, value in ir.load(graphs.file(entry["file"])).graph.initializers.items():
                if isinstance(value.const_value, ir.ExternalTensor):
                    name = global_name(entry["name"], entry.get("layers", ()), local)
                    self._tensors[name] = value.const_value
        self._table = map_table(graphs)
        self.dtype = _DTYPES[self._tensors[TABLE].dtype]

    def read(self, part: SegmentModule, local: str, check: bool) -> Iterator[Tensor]:
        name = global_name(part.name, part.layers, local)
        tensor = self._tensors[name]
        dtype = _DTYPES[tensor.dtype]
        end = int(tensor.nbytes)
        with open(tensor.path, "rb", buffering=0) as file:
            file.seek(int(tensor.offset or 0))
            for begin in range(0, end, _PIECE):
                data = np.empty(min(_PIECE, end - begin), np.uint8)
                assert file.readinto(data.data) == len(data), tensor.path
                piece = torch.from_numpy(data).view(dtype)
                if check:
                    check_finite(piece, name, tensor.path)
                yield piece

    def embeddings(self, tokens: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(self._table[tokens], np.float32))


# The source of calibration's weights.
WeightSource = CheckpointWeights | StoredWeights
