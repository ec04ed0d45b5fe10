"""Estimates the memory that a model takes at a precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.checkpoints.weight_names import TABLE, matrices
from canvasrt.defaults import (
    FOLDED_HEADS,
    LAYERS_PER_SEGMENT,
    MAX_FUSED_HEAD_DIM,
    PREFILL_CHUNK,
)
from canvasrt.formats import FORMATS, NumberFormat
from canvasrt.graphs.table import PIECE_BYTES
from canvasrt.pass_shapes import in_units, roomy_capacity, usual_capacity
from canvasrt.recipes.recipe import load_recipe, quantizable
from canvasrt.sorted_rows.description import ExpertSizes

# Bytes per weight that is not quantized.
_PLAIN_BYTES = {"fp32": 4.0, "bf16": 2.0}
# Engines share one workspace, as large as the largest. Builders take somewhat more than the tensors
# counted here.
MEMORY_MARGIN = 1.1
# What an engine holds beside its weights: the kernels of all its profiles. 16 to 31 MB with TensorRT-RTX.
ENGINE_CODE = 30 * 10**6
# The same of a piece of a body segment.
PIECE_CODE = 10 * 10**6
# Python and ONNX Runtime without a model.
CPU_PROCESS = 200 * 10**6


@dataclass(frozen=True)
class Estimate:
    """Bytes of memory while serving. `code` is the engines' kernels; `buffers` are what engines and caches exchange. On a
    CPU, `buffers` is the process itself, and bodies and head do not share a workspace."""

    weights: int
    code: int
    kv_cache: int
    workspace: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.code + self.kv_cache + self.workspace + self.buffers

    def to_json(self) -> dict[str, int]:
        """Return the parts and their sum."""
        return {**asdict(self), "total": self.total}


def estimate(
    model: ModelConfig,
    precision: str,
    max_context: int,
    max_batch: int,
    on_cpu: bool = False,
    formats: Mapping[str, str] | None = None,
    kv_cache: str | None = None,
    layers_per_segment: int = LAYERS_PER_SEGMENT,
    prefill_chunk: int = PREFILL_CHUNK,
    sees: bool = True,
    sorts_rows: bool = False,
) -> Estimate:
    """Estimate for `max_batch` requests of `max_context` tokens each; a CPU computes in fp32.

    A GPU holds the vision tower from the start. A CPU loads it for the first image, so there it is not counted.

    formats: the format of each quantized weight by global name; None quantizes everything that can
    be.
    kv_cache: the format of cached keys and values, if it differs from the graphs'.
    prefill_chunk: the most tokens per row of an encoding pass.
    sees: whether the engines include the vision tower, if the model has one.
    sorts_rows: whether kernels of our own run the experts, between engines of one layer each.
    """
    if formats is None:
        formats = _default_formats(model, precision)
    model = model if sees else replace(model, vision=None)
    element = 4 if on_cpu or precision == "fp32" else 2
    cached = sum(
        2 * layer.num_kv_heads * layer.head_dim * _cached_tokens(model, layer, max_context)
        for layer in model.layers
    )
    number = 1 if kv_cache and not on_cpu else element
    weights = segment_bytes(model, precision, layers_per_segment, formats, on_cpu)
    row = max(model.canvas_length, min(prefill_chunk, max_context))
    cache = cached * max_batch * number
    head = _head_workspace(model, max_batch, element, on_cpu, formats.get(TABLE))
    if on_cpu:
        body = _cpu_body_workspace(model, max_context, row)
        return Estimate(
            weights=sum(size for name, size in weights.items() if name != "vision"),
            code=0,
            kv_cache=cache,
            workspace=round(MEMORY_MARGIN * (body + head)),
            buffers=CPU_PROCESS,
        )
    body = _body_workspace(model, max_context, max_batch, element, row, not sorts_rows)
    buffers = _buffers(model, max_context, max_batch, element, number, layers_per_segment, row)
    code = ENGINE_CODE * len(weights)
    if sorts_rows:
        bodies = sum(name.startswith("body_") for name in weights)
        code += PIECE_CODE * (len(model.layers) + bodies) - ENGINE_CODE * bodies
        tokens = max(row, max_batch * model.canvas_length)
        buffers += sum(expert_sizes(model).buffers(tokens, element).values())
    return Estimate(
        weights=sum(weights.values()),
        code=code,
        kv_cache=cache,
        workspace=round(MEMORY_MARGIN * max(body, head)),
        buffers=buffers,
    )


def expert_sizes(model: ModelConfig) -> ExpertSizes:
    """Return the sizes of a model's experts."""
    inner = model.moe_intermediate_size
    return ExpertSizes(model.num_experts, model.top_k_experts, model.hidden_size, inner)


class Reading(NamedTuple):
    """How prompts are read: the most tokens per row of an encoding pass, and whether images are seen."""

    prefill_chunk: int
    sees: bool


def reading(model: ModelConfig, limit: int | None, of: Callable[[Reading], Estimate]) -> Reading:
    """Return how prompts are read in `limit` bytes. Shorter passes are tried before dropping the vision
    tower; if neither fits, both are kept.

    of: the estimate for one way.
    """
    chunks = (PREFILL_CHUNK, min(model.canvas_length, PREFILL_CHUNK))
    sights = (True, False) if model.vision else (False,)
    ways = [Reading(chunk, sees) for sees in sights for chunk in chunks]
    if limit is None:
        return ways[0]
    return next((way for way in ways if of(way).total <= limit), ways[0])


def segment_bytes(
    model: ModelConfig,
    precision: str,
    layers_per_segment: int,
    formats: Mapping[str, str] | None = None,
    on_cpu: bool = False,
    without: tuple[str, ...] = (),
) -> dict[str, int]:
    """Return each segment's bytes of weights; on a CPU, in the lowered form. Names that end as in `without` do not count."""
    base = "fp32" if on_cpu or precision == "fp32" else "bf16"
    if formats is None:
        formats = _default_formats(model, precision)
    widths = quantizable(model)
    sizes: dict[str, float] = {}
    for name, count in parameters(model).items():
        if without and name.endswith(without):
            continue
        segment = "head"
        if name.startswith("layers."):
            segment = f"body_{int(name.split('.')[1]) // layers_per_segment}"
        elif name == "vision":
            segment = name
        format = FORMATS.get(formats.get(name, base))
        if format is None:
            each = _PLAIN_BYTES[base]
        else:
            each = _quantized_bytes(format, widths[name], on_cpu)
        if format is not None and name == TABLE and format.projects:
            each += _PLAIN_BYTES[base]  # its rows, for lookups
        sizes[segment] = sizes.get(segment, 0) + count * each
    return {segment: round(size) for segment, size in sizes.items()}


def _quantized_bytes(format: NumberFormat, width: int, on_cpu: bool) -> float:
    return format.cpu_bytes(width) if on_cpu else format.weight_bytes(width) * format.engine_copies


def parameters(model: ModelConfig) -> dict[str, int]:
    """Return the size of every matrix by its global name; norms are too small to count."""
    counts = {name: each.size for name, each in matrices(model).items()}
    return counts | ({"vision": vision_parameters(model)} if model.vision else {})


def vision_parameters(model: ModelConfig) -> int:
    """Return the number of weights in the vision tower's layers, which are nearly all of it; it is
    not quantized."""
    if model.vision is None:
        return 0
    config = model.vision
    hidden, layers = config.get("hidden_size", 0), config.get("num_hidden_layers", 0)
    attention = 4 * hidden * config.get("num_attention_heads", 0) * config.get("head_dim", 0)
    return layers * (attention + 3 * hidden * config.get("intermediate_size", 0))


def _default_formats(model: ModelConfig, precision: str) -> dict[str, str]:
    """Return the default format of each quantized weight: that of the recipe named like the precision."""
    if precision not in FORMATS:
        return {}
    chosen = load_recipe(precision).formats(model)
    return {name: choice.format for name, choice in chosen.items()}


def _buffers(
    model: ModelConfig,
    max_context: int,
    max_batch: int,
    element: int,
    number: int,
    layers_per_segment: int,
    row: int,
) -> int:
    """Return the bytes of the buffers that runtime.gpu.workspace takes.

    These are every engine's hidden states and two of each request, the new keys and values of an
    encoding or denoising pass, and one slot's keys on their way to another width. `number` is the
    bytes of one cached number, `row` the most tokens per row of an encoding pass.
    """
    encoded = row
    canvases = max_batch * model.canvas_length
    cut = [
        model.layers[first : first + layers_per_segment]
        for first in range(0, len(model.layers), layers_per_segment)
    ]
    states = (len(cut) + 1) * max(canvases, encoded) + 2 * canvases
    token = [sum(2 * each.num_kv_heads * each.head_dim for each in layers) for layers in cut]
    slot = max(
        each.num_kv_heads * each.head_dim * _cached_tokens(model, each, max_context)
        for each in model.layers
    )
    new = max(encoded * sum(token), canvases * max(token))
    return states * model.hidden_size * element + (new + slot) * number


def _body_workspace(
    model: ModelConfig, max_context: int, max_batch: int, element: int, longest: int, slots: bool
) -> int:
    """Return a body segment's peak bytes: its layers' largest attention, or its experts' `slots`, if it has any.

    The profiles are those of `build.profiles`: `longest` tokens of one prompt, one canvas, or a full batch of canvases.
    """
    canvas = model.canvas_length
    roomy = max(canvas, roomy_capacity(model, longest))

    def attention(length: int) -> int:
        return max(
            _attention_workspace(model, each, max_context, length, element) for each in model.layers
        )

    capacity = max(usual_capacity(model, longest), roomy, usual_capacity(model, canvas * max_batch))
    # Gathered rows, the experts' intermediate results, and their outputs.
    slot = 2 * model.hidden_size + 3 * model.moe_intermediate_size
    experts = model.num_experts * capacity * slot * element if slots else 0
    return max(attention(longest), attention(canvas) * max_batch, experts)


def _cpu_body_workspace(model: ModelConfig, max_context: int, longest: int) -> int:
    """Return the bytes of the largest operator's tensors in float32: attention's scores of all heads beside the joined
    keys and values, or the experts' rows, which are sorted and have no empty slots."""
    inner, rows = model.moe_intermediate_size, longest * model.top_k_experts
    experts = rows * (2 * model.hidden_size + 3 * inner)
    attention = 0
    for layer in model.layers:
        keys = _cached_tokens(model, layer, max_context) + longest
        scores = model.num_attention_heads * longest * keys
        attention = max(attention, scores + 2 * layer.num_kv_heads * keys * layer.head_dim)
    return 4 * max(experts, attention)


def _attention_workspace(
    model: ModelConfig, layer: Layer, max_context: int, length: int, element: int
) -> int:
    """Return one row's bytes: joined keys and values, or if not fused, transposed keys and two sets of scores."""
    keys = _cached_tokens(model, layer, max_context) + length
    turned = layer.num_kv_heads * keys * layer.head_dim
    if layer.head_dim <= MAX_FUSED_HEAD_DIM:
        return (2 * turned + length * keys) * element
    heads = min(FOLDED_HEADS, model.num_attention_heads // layer.num_kv_heads)
    scores = layer.num_kv_heads * heads * length * keys
    mask = 4 * length * keys  # in float32
    return (turned + 2 * scores) * element + mask


def _head_workspace(
    model: ModelConfig, max_batch: int, element: int, on_cpu: bool, table: str | None
) -> int:
    """Return the bytes of the vocabulary-sized tensors that the sampler holds at once.

    A GPU keeps what the projection wrote, unnormalised probabilities, and these in the table's format if products with
    the table round their inputs. ONNX Runtime runs one request and one operator at a time, in float32, and widens a piece
    of the table. (Only small passes run side by side.)
    """
    logits = model.canvas_length * model.vocab_size
    if on_cpu:
        return round(3.5 * logits * 4) + (PIECE_BYTES if table in FORMATS else 0)
    rounded = FORMATS[table].bits / 8 if table in FORMATS and FORMATS[table].projects else 0
    return round(max_batch * logits * (2 * element + rounded))


def _cached_tokens(model: ModelConfig, layer: Layer, max_context: int) -> int:
    kept = min(max_context, model.sliding_window - 1) if layer.kind == "sliding" else max_context
    return in_units(kept)
