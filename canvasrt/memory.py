"""How much memory a model takes at a precision: the arithmetic behind `canvasrt build --dry-run`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from canvasrt.model import Layer, ModelConfig

# Bytes a weight of the experts, of the other matrices, and of the embedding table. NVFP4 is 4 bits and an
# 8-bit scale for each 16; the recipe of the released NVFP4 checkpoint quantizes the experts alone.
_WEIGHT_BYTES = {
    "fp32": (4.0, 4.0, 4.0),
    "bf16": (2.0, 2.0, 2.0),
    "fp8": (1.0, 1.0, 2.0),
    "nvfp4": (0.5625, 2.0, 2.0),
}
_WORKSPACE_TENSORS = 3  # vocabulary-sized, or expert-slot-sized, alive at once


@dataclass(frozen=True)
class Estimate:
    """Bytes of device memory while serving."""

    weights: int
    kv_cache: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.workspace

    def to_json(self) -> dict[str, int]:
        """The parts and their sum."""
        return {**asdict(self), "total": self.total}


def estimate(
    model: ModelConfig, precision: str, max_context: int, max_batch: int, on_cpu: bool = False
) -> Estimate:
    """Estimate for `max_batch` requests of `max_context` tokens each; a CPU computes in fp32."""
    experts, dense, table = _WEIGHT_BYTES["fp32" if on_cpu else precision]
    element = 4 if on_cpu or precision == "fp32" else 2
    weights = (
        len(model.layers) * expert_parameters(model) * experts
        + dense_parameters(model) * dense
        + model.vocab_size * model.hidden_size * table
        + vision_parameters(model) * (4 if on_cpu or precision == "fp32" else 2)
    )
    cached = sum(
        2 * layer.num_kv_heads * layer.head_dim * _cached_tokens(model, layer, max_context)
        for layer in model.layers
    )
    tokens = model.canvas_length * max_batch
    widest = max(model.vocab_size, model.top_k_experts * 4 * model.hidden_size)
    return Estimate(
        weights=round(weights),
        kv_cache=cached * max_batch * element,
        workspace=tokens * widest * 4 * _WORKSPACE_TENSORS,
    )


def expert_parameters(model: ModelConfig) -> int:
    """Weights of one layer's routed experts."""
    return model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size


def dense_parameters(model: ModelConfig) -> int:
    """Weights of all matrices of the text network outside of the experts and the embedding table."""
    mlp = 3 * model.hidden_size * model.intermediate_size
    router = model.hidden_size * model.num_experts
    attention = sum(_attention_parameters(model, layer) for layer in model.layers)
    return len(model.layers) * (mlp + router) + attention + mlp  # the last: self-conditioning


def vision_parameters(model: ModelConfig) -> int:
    """Weights of the vision tower's layers, which are all but all of it; it is not quantized."""
    if model.vision is None:
        return 0
    config = model.vision
    hidden, layers = config.get("hidden_size", 0), config.get("num_hidden_layers", 0)
    attention = 4 * hidden * config.get("num_attention_heads", 0) * config.get("head_dim", 0)
    return layers * (attention + 3 * hidden * config.get("intermediate_size", 0))


def _attention_parameters(model: ModelConfig, layer: Layer) -> int:
    queries = model.num_attention_heads * layer.head_dim
    keys = layer.num_kv_heads * layer.head_dim
    projections = 2 if layer.kind == "sliding" else 1  # full layers share one for K and V
    return model.hidden_size * (2 * queries + projections * keys)


def _cached_tokens(model: ModelConfig, layer: Layer, max_context: int) -> int:
    return min(max_context, model.sliding_window - 1) if layer.kind == "sliding" else max_context
