"""Measures how much a bundle's weights differ from the checkpoint's, per matrix and per expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import DECODER, DOWN, GATE_UP, PROJECTION, TABLE
from canvasrt.errors import CanvasError
from canvasrt.fidelity.capture import CapturedPass
from canvasrt.fidelity.stats import RelativeError
from canvasrt.formats import FORMATS, INT4, INT8
from canvasrt.graphs import lowbits
from canvasrt.graphs.names import CODES, SCALES, TABLE_SCALE, TABLE_VALUES
from canvasrt.progress import report
from canvasrt.types import Json

if TYPE_CHECKING:
    from canvasrt.export.checkpoint import Checkpoint

EXPERT_WEIGHTS = (GATE_UP, DOWN)


def weight_errors(
    bundle: Bundle, checkpoint_path: Path, passes: Sequence[CapturedPass]
) -> tuple[list[Json], list[Json]]:
    """Compare a bundle's graphs with the checkpoint, one expert or matrix in memory at a time.

    Return one entry per matrix, and one per expert. A matrix's entry has its relative error; its name as in recipes;
    its format, or None if the matrix is not quantized; and `kept`: whether the checkpoint stores the matrix in that
    format, so that codes should be equal. An expert's entry has the errors of its two matrices, and the error of its
    output over the tokens that the reference routed to it. The output is computed without rounding inputs. If no tokens
    were routed to the expert, the output's error is None.
    """
    from canvasrt.export.checkpoint import Checkpoint

    checkpoint, config = Checkpoint(checkpoint_path), bundle.manifest.model
    matrices: list[Json] = []
    experts: list[Json] = []
    for entry in (entry for entry in bundle.manifest.segments if "layers" in entry):
        graph = _Weights(bundle.file(entry["file"]))
        formats = entry.get("quantized") or {}
        for local, layer in enumerate(entry["layers"]):
            report("comparing weights", layer, len(config.layers))
            errors, totals = _experts(graph, local, layer, checkpoint, passes)
            experts += errors
            matrices += _matrices(graph, local, layer, checkpoint, config, formats, totals)
    matrices += _table(bundle, checkpoint)
    if "checkpoint_quantization" not in bundle.manifest.options:
        # The export did not keep the checkpoint's codes. Quantizing dequantized weights again gives different codes.
        matrices = [each | {"kept": False} for each in matrices]
    report("comparing weights", len(config.layers), len(config.layers))
    return matrices, experts


def _matrix(
    name: str, layer: int | None, format: str | None, error: RelativeError, kept: bool = False
) -> Json:
    found = {"name": name, "layer": layer, "format": format}
    return found | {"error": error.value, "kept": kept}


def _matrices(
    graph: _Weights,
    local: int,
    layer: int,
    checkpoint: Checkpoint,
    config: ModelConfig,
    formats: Mapping[str, str],
    experts: Mapping[str, RelativeError],
) -> Iterator[Json]:
    """Yield one entry per matrix of a layer. `experts` has the errors of expert matrices; this function compares all
    other matrices."""
    from canvasrt.export.weights import body_sources
    from canvasrt.fidelity.streamed import held_format

    for name, parts in body_sources(config, layer, 1).items():
        short = name.removeprefix("layers.0.")
        ours = f"layers.{local}.{short}"
        if short not in experts and not graph.is_matrix(ours):
            continue
        error = experts.get(short)
        if error is None:
            error = RelativeError()
            for pair in _pairs(graph, ours, checkpoint, parts):
                error.add(*pair)
        full = f"layers.{layer}.{short.removesuffix('.weight')}"
        format = formats.get(full)
        kept = format is not None and held_format(checkpoint, parts, graph.shape(ours)) == format
        yield _matrix(full, layer, format, error, kept)


def _table(bundle: Bundle, checkpoint: Checkpoint) -> list[Json]:
    """Return an entry for the embedding table if it is quantized. Only one part of the table is in memory at a time."""
    from canvasrt.export.weights import head_sources

    (head,) = (entry for entry in bundle.manifest.segments if entry["name"] == "head")
    format = (head.get("quantized") or {}).get(TABLE)
    if format is None:
        return []
    graph, error, first = _Weights(bundle.file(head["file"])), RelativeError(), 0
    read = graph.projection if FORMATS[format].projects else graph.table
    for part in checkpoint.chunks(*head_sources(bundle.manifest.model)[TABLE]):
        rows = slice(first, first + len(part))
        error.add(read(rows), part.float().numpy())
        first += len(part)
    return [_matrix(TABLE, None, format, error)]


class _Weights:
    """The weights of one graph, read from its external data on demand."""

    def __init__(self, file: Path) -> None:
        import onnx_ir as ir

        self.file = file
        self._all = ir.load(file).graph.initializers

    def is_matrix(self, name: str) -> bool:
        """Return whether a weight is a matrix rather than a norm's vector."""
        return name + CODES in self._all or self.array(name).ndim > 1

    def shape(self, name: str) -> tuple[int, ...]:
        """Return `[out, in]`, or `[E, out, in]` for stacked experts, even if a CPU build split the stack."""
        count = self._count(name)
        part = ".0" if count else ""
        if name + CODES + part in self._all:
            rows = self.array(name + SCALES + part).shape[:-1]
            size = 2 * self.array(name + CODES + part).size
            shape = (*rows, size // int(np.prod(rows)))
        else:
            shape = self.array(name + part).shape
        return (count, *shape) if count else shape

    def read(self, name: str) -> Iterator[np.ndarray]:
        """Yield a matrix in float32; for stacked experts, one matrix per expert, even if a CPU build split the
        stack."""
        count = self._count(name)
        if count:
            for expert in range(count):
                yield self._matrix(name, f".{expert}")
            return
        whole = self._matrix(name)
        yield from (np.array(each, np.float32) for each in (whole if whole.ndim == 3 else [whole]))

    def table(self, rows: slice) -> np.ndarray:
        """Return rows of an embedding table in INT8, converted to float32."""
        scale = np.array(self.array(TABLE_SCALE)[rows], np.float32)
        codes = np.array(self.array(TABLE_VALUES)[rows]).view(np.uint8)
        return lowbits.scaled(lowbits.numbers_of(INT8, codes), scale, None, None)

    def projection(self, rows: slice) -> np.ndarray:
        """Return rows of the table's quantized copy (`PROJECTION`), converted to float32."""
        return np.array(self.array(PROJECTION)[rows], np.float32)

    def _count(self, name: str) -> int:
        """Return how many experts a split stack has; 0 if `name` is not a split stack."""
        count = 0
        while {f"{name}.{count}", f"{name}{CODES}.{count}"} & self._all.keys():
            count += 1
        return count

    def _matrix(self, name: str, expert: str = "") -> np.ndarray:
        """Return one matrix in float32, dequantized if it is INT4."""
        if name + CODES + expert not in self._all:
            return np.array(self.array(name + expert), np.float32)
        codes, scales = (self.array(name + part + expert) for part in (CODES, SCALES))
        packed = codes.reshape(*scales.shape[:-1], -1) ^ lowbits.INT4_OFFSET
        return lowbits.scaled(lowbits.numbers_of(INT4, packed), None, scales, None)

    def array(self, name: str) -> np.ndarray:
        from canvasrt.graphs import external

        value = self._all.get(name)
        if value is None or value.const_value is None:
            raise CanvasError(
                f"{self.file} has no weight {name}",
                "compare a bundle built with `canvasrt build --target cpu`",
            )
        return external.array(value.const_value)


def _pairs(
    graph: _Weights, name: str, checkpoint: Checkpoint, parts: Sequence[str]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a graph's matrix and its counterpart in the checkpoint. Stacked experts are yielded one by one."""
    from canvasrt.fidelity.streamed import wide_rows

    shape = graph.shape(name)
    rest = np.empty((0, shape[-1]), np.float32)
    pieces = wide_rows(checkpoint, parts, shape)
    for ours in graph.read(name):
        while len(rest) < shape[-2]:
            rest = np.concatenate([rest, next(pieces).numpy().reshape(-1, shape[-1])])
        yield ours, rest[: shape[-2]]
        rest = rest[shape[-2] :]


def _experts(
    graph: _Weights, local: int, layer: int, checkpoint: Checkpoint, passes: Sequence[CapturedPass]
) -> tuple[list[Json], dict[str, RelativeError]]:
    """Return the errors of each expert in a layer, and the errors of `gate_up` and `down` over all experts."""
    stored = f"{DECODER}.layers.{layer}.experts"
    both = [
        _pairs(graph, f"layers.{local}.{short}", checkpoint, [f"{stored}.{theirs}"])
        for short, theirs in zip(EXPERT_WEIGHTS, ("gate_up_proj", "down_proj"), strict=True)
    ]
    tokens, chosen = (
        np.concatenate(each) for each in zip(*(seen.routed[layer] for seen in passes), strict=True)
    )
    errors, totals = [], {short: RelativeError() for short in EXPERT_WEIGHTS}
    for expert, (gate_up, down) in enumerate(zip(*both, strict=True)):
        given = tokens[(chosen == expert).any(axis=-1)]
        output = RelativeError()
        if len(given):
            output.add(_expert(given, gate_up[0], down[0]), _expert(given, gate_up[1], down[1]))
        own = []
        for total, pair in zip(totals.values(), (gate_up, down), strict=True):
            own.append(RelativeError())
            own[-1].add(*pair)
            total.off, total.size = total.off + own[-1].off, total.size + own[-1].size
        first, second = (each.value for each in own)
        value = output.value if len(given) else None
        found: Json = {"layer": layer, "expert": expert, "gate_up": first, "down": second}
        errors.append(found | {"tokens": len(given), "output": value})
    return errors, totals


def _expert(tokens: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Run one expert's gated MLP over `tokens` `[T, D]`."""
    import torch
    from torch.nn import functional as F

    gate, up = (torch.from_numpy(tokens) @ torch.from_numpy(gate_up).T).chunk(2, dim=-1)
    inner = F.gelu(gate, approximate="tanh") * up
    return (inner @ torch.from_numpy(down).T).numpy()
