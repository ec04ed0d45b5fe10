"""Properties of a bundle that all models need: limits, embedding table, dtypes, work per pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canvasrt.bundle import Bundle, Manifest
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import MAX_CONTEXT
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require


def pass_work(config: ModelConfig) -> int:
    """Return how many multiply-adds one request's denoising pass spends on products with weight matrices."""
    size, experts = config.hidden_size, config.top_k_experts
    gated = 3 * size
    weights = 2 * config.vocab_size * size + gated * config.intermediate_size
    for layer in config.layers:
        # Full layers have no value projection: their values are the keys.
        projections = 1 if layer.kind == "full" else 2
        heads = 2 * config.num_attention_heads + projections * layer.num_kv_heads
        weights += size * layer.head_dim * heads
        weights += gated * (config.intermediate_size + experts * config.moe_intermediate_size)
    return weights * config.canvas_length


def max_context(manifest: Manifest) -> int:
    """Return the maximum number of tokens of a request: prompt plus answer."""
    limit = min(manifest.model.max_position_embeddings, MAX_CONTEXT)
    return int(manifest.options.get("max_context") or limit)


def limited_context(most: int, wanted: int | None) -> int:
    """Return the maximum number of tokens of a request: `wanted`, or the engines' limit `most` if `wanted` is None.
    Raises UsageError if `wanted` exceeds `most`."""
    if wanted is not None and wanted > most:
        raise UsageError(
            f"--max-model-len is {wanted}, but the engines support at most {most}",
            f"give at most {most}, or build engines with a larger --max-context",
        )
    return most if wanted is None else wanted


@dataclass(frozen=True)
class QuantizedTable:
    """INT8 codes `[vocab_size, hidden_size]`, and a scale per token."""

    codes: np.ndarray
    scale: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the scales. Graphs compute in this dtype."""
        return self.scale.dtype

    def __getitem__(self, tokens: np.ndarray, /) -> np.ndarray:
        """Return the rows in float32."""
        return self.codes[tokens] * self.scale[tokens].astype(np.float32)[..., None]


# The embeddings of all tokens: `table[tokens]` is `[..., hidden_size]` for int64 `tokens` `[...]`.
Table = np.ndarray | QuantizedTable


def map_table(bundle: Bundle) -> Table:
    """Memory-map the embedding table `[vocab_size, hidden_size]`."""
    entry = bundle.manifest.embedding
    if not entry:
        raise CanvasError(f"{bundle.path} has no embedding table", "export the checkpoint again")
    file, shape = bundle.file(entry["file"]), tuple(entry["shape"])
    table = np.memmap(file, host_dtype(entry["dtype"]), "r", shape=shape)
    if "scale" not in entry:
        return table
    dtype, offset = host_dtype(entry["scale"]["dtype"]), int(entry["scale"]["offset"])
    return QuantizedTable(table, np.memmap(file, dtype, "r", offset, shape[:1]))


def scaled_embeddings(table: Table, tokens: np.ndarray) -> np.ndarray:
    """Return scaled embeddings, float32 `[..., hidden_size]`, of int64 `tokens` `[...]`."""
    rows = np.asarray(table[tokens], np.float32)
    # As in the reference, the scale is rounded to the table's dtype.
    return rows * np.float32(table.dtype.type(rows.shape[-1] ** 0.5))


def host_dtype(name: str) -> np.dtype:
    """Return the dtype called `name`. NumPy lacks some, such as bfloat16 and float8_e4m3fn; ml_dtypes has them."""
    try:
        return np.dtype(name).newbyteorder("<")
    except TypeError:
        return np.dtype(getattr(require("ml_dtypes", "gpu"), name))
