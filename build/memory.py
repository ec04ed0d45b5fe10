"""Estimates the memory that serving a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from canvasrt.build.expert_forms import SLOTS, Experts
from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.checkpoints.weight_names import TABLE, matrices
from canvasrt.defaults import (
    FOLDED_HEADS,
    LAYERS_PER_SEGMENT,
    MAX_FUSED_HEAD_DIM,
    TABLE_PIECE_BYTES,
)
from canvasrt.formats import FORMATS
from canvasrt.pass_shapes import PassPlan, canvas_sizes
from canvasrt.recipes.recipe import load_recipe, quantizable

# Bytes per number of a weight that is not quantized.
_PLAIN_BYTES = {"fp32": 4.0, "bf16": 2.0}
# The shared workspace is multiplied by this, because builders use somewhat more memory than the tensors that are
# counted here.
MEMORY_MARGIN = 1.1
# Bytes that an engine takes in addition to its weights. The kernels of all profiles take 16 to 31 MB in TensorRT-RTX.
ENGINE_CODE = 30 * 10**6
# Bytes of device memory per execution context, and per layer of a captured graph. These are allowances, not
# measurements.
CONTEXT, CAPTURED_LAYER = 2 * 10**6, 10**6
# A context takes up to this many times as much host memory as device memory.
CONTEXT_ON_HOST = 4
# Bytes of memory that Python and ONNX Runtime take without a model.
CPU_PROCESS = 200 * 10**6


@dataclass(frozen=True)
class Estimate:
    """The memory that serving takes, in bytes.

    `code` is for the engines' kernels; `buffers` for inputs, outputs and hidden states; `contexts` for execution
    contexts and captured graphs. On a CPU, `buffers` is what the process takes without a model, and `workspace` is the
    sum of the bodies' and the head's workspace."""

    weights: int
    code: int
    kv_cache: int
    workspace: int
    buffers: int
    contexts: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(asdict(self).values())

    @property
    def contexts_on_host(self) -> int:
        """How many bytes of host memory execution contexts and captured graphs take."""
        return CONTEXT_ON_HOST * self.contexts

    def to_json(self) -> dict[str, int]:
        """Return the parts, their sum, and the host memory that contexts take."""
        return {**asdict(self), "total": self.total, "contexts_on_host": self.contexts_on_host}


@dataclass(frozen=True)
class Weights:
    """A model's weights as a bundle stores them.

    Attributes:
        precision: fp32, bf16, or a recipe's precision.
        formats: the quantized weights' formats by global name. If None, the recipe that `precision` names decides.
        on_cpu: whether weights are in the CPU's form: widened to float32, or packed for ONNX Runtime.
        in_files: whether to return sizes in graph files. Otherwise, sizes in memory are returned. These can be larger:
        engines store some weights twice, and ONNX Runtime adds a sum per block.
    """

    model: ModelConfig
    precision: str
    formats: Mapping[str, str] | None = None
    layers_per_segment: int = LAYERS_PER_SEGMENT
    on_cpu: bool = False
    in_files: bool = False

    @property
    def base(self) -> str:
        """The precision of unquantized weights."""
        return "fp32" if self.on_cpu or self.precision == "fp32" else "bf16"

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """The quantized weights' formats by global name."""
        if self.formats is not None:
            return self.formats
        if self.precision not in FORMATS:
            return {}
        recipe = load_recipe(self.precision).formats(self.model)
        return {name: choice.format for name, choice in recipe.items()}

    def segments(self, without: tuple[str, ...] = ()) -> dict[str, int]:
        """Return every segment's weights in bytes. Weights whose names end with one of `without` do not count."""
        sizes = dict[str, float]()
        for name, size in self.sizes().items():
            if without and name.endswith(without):
                continue
            segment = "head"
            if name.startswith("layers."):
                segment = f"body_{int(name.split('.')[1]) // self.layers_per_segment}"
            elif name == "vision":
                segment = name
            sizes[segment] = sizes.get(segment, 0) + size
        return {segment: round(size) for segment, size in sizes.items()}

    def sizes(self) -> dict[str, float]:
        """Return every weight's size in bytes by global name."""
        widths = quantizable(self.model)
        return {
            name: count * self._bytes(name, widths.get(name, 0))
            for name, count in parameters(self.model).items()
        }

    @property
    def table(self) -> int:
        """The embedding table's size in bytes, without the FP8 copy that some recipes add for products."""
        format = FORMATS.get(self.chosen.get(TABLE, ""))
        count = parameters(self.model)[TABLE]
        plain = format is None or format.projects
        return round(count * _PLAIN_BYTES[self.base]) if plain else round(self.sizes()[TABLE])

    def _bytes(self, name: str, width: int) -> float:
        """Return how many bytes each number of a weight takes, if the weight's rows have `width` numbers."""
        format, plain = FORMATS.get(self.chosen.get(name, self.base)), _PLAIN_BYTES[self.base]
        if format is None:
            return plain
        # Next to its FP8 codes, the table keeps its unquantized rows for lookups.
        rows = plain if name == TABLE and format.projects else 0.0
        if self.on_cpu:
            return rows + format.cpu_bytes(width, self.in_files)
        return rows + format.weight_bytes(width) * (1 if self.in_files else format.engine_copies)


def parameters(model: ModelConfig) -> dict[str, int]:
    """Return how many numbers each matrix has, by global name. Norms are too small to count."""
    counts = {name: each.size for name, each in matrices(model).items()}
    return counts | ({"vision": vision_parameters(model)} if model.vision else {})


def vision_parameters(model: ModelConfig) -> int:
    """Return the number of weights in the vision tower's layers. The tower has few other weights, and none of its
    weights are quantized."""
    if model.vision is None:
        return 0
    config = model.vision
    hidden, layers = config.get("hidden_size", 0), config.get("num_hidden_layers", 0)
    attention = 4 * hidden * config.get("num_attention_heads", 0) * config.get("head_dim", 0)
    return layers * (attention + 3 * hidden * config.get("intermediate_size", 0))


def estimate(
    weights: Weights, passes: PassPlan, kv_cache: str | None = None, experts: Experts = SLOTS
) -> Estimate:
    """Estimate the memory of serving on a GPU, or on a CPU if `weights.on_cpu`.

    kv_cache: the format of cached keys and values; None for the graphs' own dtype.
    """
    if weights.on_cpu:
        return _on_cpu(weights, passes)
    # The vision tower is in the GPU's memory from the start.
    model, segments = weights.model, weights.segments()
    element = 4 if weights.base == "fp32" else 2
    number = 1 if kv_cache else element
    body = max(_attention(model, passes, element), experts.workspace(model, passes, element))
    bodies = sum(name.startswith("body_") for name in segments)
    code = ENGINE_CODE * (len(segments) - bodies)
    return Estimate(
        weights=sum(segments.values()),
        code=code + experts.code(len(model.layers), bodies, ENGINE_CODE),
        kv_cache=number * passes.batch * _cached_numbers(model, passes),
        workspace=round(MEMORY_MARGIN * max(body, _head(weights, passes, element))),
        buffers=_buffers(weights, passes, element, number)
        + experts.buffers(model, passes, element),
        contexts=CONTEXT * context_count(model, passes, bodies, experts)
        + CAPTURED_LAYER * len(model.layers) * (passes.batch + (passes.batch > 1)),
    )


def _on_cpu(weights: Weights, passes: PassPlan) -> Estimate:
    """Estimate a CPU's memory in fp32. The vision tower is left out: it is only loaded at the first image."""
    model = weights.model
    return Estimate(
        weights=sum(size for name, size in weights.segments().items() if name != "vision"),
        code=0,
        kv_cache=4 * passes.batch * _cached_numbers(model, passes),
        workspace=round(MEMORY_MARGIN * (_cpu_body(model, passes) + _cpu_head(weights))),
        buffers=CPU_PROCESS,
    )


def context_count(model: ModelConfig, passes: PassPlan, bodies: int, experts: Experts) -> int:
    """Return the number of execution contexts while serving. The head has one per profile, one for captured passes of
    single requests, and, if requests are batched, one for captured shared passes. The vision tower has one."""
    head = 2 + 2 * (passes.batch > 1) + (len(canvas_sizes(passes.canvas)) > 1)
    body = experts.contexts(len(model.layers), bodies, passes.batch)
    return body + head + (model.vision is not None)


def _cached_numbers(model: ModelConfig, passes: PassPlan) -> int:
    """Return how many numbers one request's cache contains."""
    return sum(
        2 * layer.num_kv_heads * layer.head_dim * passes.cached(layer) for layer in model.layers
    )


def _buffers(weights: Weights, passes: PassPlan, element: int, number: int) -> int:
    """Return the size in bytes of the buffers that runtime.gpu.workspace allocates.

    These are: hidden states of every engine; two canvases of hidden states per request; a pass's new keys and values;
    and a copy of one layer's keys or values in one KV cache slot, needed when the slot's width changes. A cached number
    takes `number` bytes.
    """
    model, encoded = weights.model, passes.lengths[-1]
    canvases = passes.batch * passes.canvas
    step = weights.layers_per_segment
    cut = [model.layers[first : first + step] for first in range(0, len(model.layers), step)]
    states = (len(cut) + 1) * max(canvases, encoded) + 2 * canvases
    token = [sum(2 * each.num_kv_heads * each.head_dim for each in layers) for layers in cut]
    slot = max(each.num_kv_heads * each.head_dim * passes.cached(each) for each in model.layers)
    new = max(encoded * sum(token), canvases * max(token))
    return states * model.hidden_size * element + (new + slot) * number


def _attention(model: ModelConfig, passes: PassPlan, element: int) -> int:
    """Return attention's peak memory in bytes, for the longest prompt chunk or a full batch of canvases."""

    def largest(length: int) -> int:
        return max(_layer_attention(model, passes, each, length, element) for each in model.layers)

    return max(largest(passes.lengths[-1]), largest(passes.canvas) * passes.batch)


def _layer_attention(
    model: ModelConfig, passes: PassPlan, layer: Layer, length: int, element: int
) -> int:
    """Return how many bytes attention takes for one request. Fused attention needs a mask, and copies that join
    cached and new keys and values. Other attention needs a mask, transposed keys, and two sets of scores."""
    keys = passes.cached(layer) + length
    turned = layer.num_kv_heads * keys * layer.head_dim
    if layer.head_dim <= MAX_FUSED_HEAD_DIM:
        return (2 * turned + length * keys) * element
    heads = min(FOLDED_HEADS, model.num_attention_heads // layer.num_kv_heads)
    scores = layer.num_kv_heads * heads * length * keys
    mask = 4 * length * keys  # in float32
    return (turned + 2 * scores) * element + mask


def _head(weights: Weights, passes: PassPlan, element: int) -> int:
    """Return the size in bytes of the vocabulary-sized tensors that are in a GPU's memory at the same time: logits,
    unnormalised probabilities, and the codes of these probabilities if their product with the table is quantized."""
    format = FORMATS.get(weights.chosen.get(TABLE, ""))
    rounded = format.bits / 8 if format is not None and format.projects else 0
    logits = passes.batch * passes.canvas * weights.model.vocab_size
    return round(logits * (2 * element + rounded))


def _cpu_head(weights: Weights) -> int:
    """Return how many bytes the head takes on a CPU. ONNX Runtime runs one operator at a time in float32, and
    dequantizes the table piece by piece. (Only small passes of several requests run concurrently.)"""
    logits = weights.model.canvas_length * weights.model.vocab_size
    return round(3.5 * logits * 4) + (
        TABLE_PIECE_BYTES if weights.chosen.get(TABLE) in FORMATS else 0
    )


def _cpu_body(model: ModelConfig, passes: PassPlan) -> int:
    """Return the size in bytes of the largest operator's tensors in float32. The largest operator is either
    attention (all heads' scores, and joined keys and values) or the experts (sorted rows, without empty slots)."""
    longest = passes.lengths[-1]
    inner, rows = model.moe_intermediate_size, longest * model.top_k_experts
    experts = rows * (2 * model.hidden_size + 3 * inner)
    attention = 0
    for layer in model.layers:
        keys = passes.cached(layer) + longest
        scores = model.num_attention_heads * longest * keys
        attention = max(attention, scores + 2 * layer.num_kv_heads * keys * layer.head_dim)
    return 4 * max(experts, attention)
