"""The resources that serving takes on a node: memory, CPU, disk, and start-up time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from canvasrt.build.expert_forms import SLOTS, find_experts
from canvasrt.build.memory import Estimate, Weights, estimate
from canvasrt.build.needs import builder_needs
from canvasrt.bundle import Manifest
from canvasrt.containers.names import READY_TIMEOUT
from canvasrt.defaults import LAYERS_PER_SEGMENT, MAX_BATCH, MAX_CONTEXT, PREFILL_CHUNK, SLOTTED
from canvasrt.engine_profiles import passes_of
from canvasrt.pass_shapes import PassPlan, PassShape, plan_passes
from canvasrt.targets import TARGETS, Target, find_target

MIB, GIB = 1 << 20, 1 << 30
# Triton, its stubs, the front end and the supervisor took 0.19 GB together with the demo model,
# after eight requests (proportional set size, 2 cores).
OVERHEAD = GIB
# With a vocabulary of 262,144 random tokens, tokenizer and grammar index took 0.63 GB in the model's process, and the
# same in the sandbox. A fork of the sandbox can use 1 GiB.
PER_TOKEN = 2 * 2500
TRIAL = GIB
# A server writes 2 MB below /tmp: the model repository and the Python backend's folder.
TEMPORARY = 256 * MIB
# Shared memory of Triton's Python backend: 4 MB measured; it starts with 1 MB per model.
SHARED = GIB
# Only servers that build engines or compile kernels write to the cache. Compiled kernels take an estimated 0.3 GB,
# and twice as much while a new file replaces the old one.
_UNUSED_CACHE, _COMPILED = GIB, 4 * GIB
# TensorRT-RTX compiles kernels on the GPU when a shape is first used. Seconds per shape and layer; a guess.
_COMPILE_SECONDS = 0.5
# Seconds of a pass over one canvas: per layer, and per layer and cached token. The slowest predicted pass, in bf16 on
# a DGX Spark, takes 267 ms at 1,024 tokens and 588 ms at 262,144 (bench/results/predicted.json).
_LAYER_SECONDS, _CACHED_SECONDS = 0.009, 45e-9
# Runs of each shape at the start: one compiles it, one captures it, and four are timed.
_RUNS = 6
_OTHER_CACHE = 5 * GIB
# The rate of a slow network disk. Engines are read from it twice: to hash them, and to load them.
_READ = 100 * 10**6  # bytes per second
_START = 300
# TensorRT-RTX built 20.1 GB in 118 s on 4 cores (docs/benchmarks.md): 6 s per GB. TensorRT also times kernels on the
# GPU, which was not measured, so allow ten times as long.
BUILD_SECONDS_PER_GB = 60
_LARGE = 10**9  # size of weights, in bytes, above which more than two CPU cores help


@dataclass(frozen=True)
class ReplicaSizes:
    """A replica's resources: sizes in bytes, whole cores, and seconds until it must be ready.

    `memory` is host memory without `shared` (/dev/shm); `temporary` is /tmp. `startup` and `memory` are for one GPU;
    each further GPU adds `further` seconds and `contexts` bytes.
    """

    memory: int
    cpu: int
    shared: int
    temporary: int
    cache: int
    startup: int
    further: int
    contexts: int = 0


def sizes_of(manifest: Manifest, target: Target, max_batch: int | None = None) -> ReplicaSizes:
    """Return the resources for serving a bundle on a target, for up to `max_batch` canvases at a time.

    If a bundle of graphs is served on a GPU, the first start also builds engines. This takes longer, and needs the
    builder's memory.
    """
    on_cpu = target.capability is None
    builds = manifest.kind == "graphs" and not on_cpu
    weights = _weights(manifest, on_cpu)
    total = sum(weights.segments().values())
    need = _serving_memory(manifest, on_cpu, max_batch)
    # Each further GPU loads the engines and warms up, but does not hash the engines again. It finds compiled kernels
    # and built engines in the cache, since all GPUs have the same name.
    plan, layers = _passes(manifest, max_batch).sharing(), len(manifest.model.layers)
    further = 0.0 if on_cpu else total / _READ + layers * _warm_up(plan)
    startup = _START + (2 * total / _READ if on_cpu else total / _READ + further)
    compiles = target.builder == "tensorrt-rtx"
    if compiles:
        startup += _COMPILE_SECONDS * len({each.sizes for each in plan}) * layers
    if builds:
        need = max(need, *builder_needs(weights, SLOTS).values())
        startup += total / 1e9 * BUILD_SECONDS_PER_GB
    return ReplicaSizes(
        memory=overhead(manifest) + need,
        cpu=4 if builds or (on_cpu and total > _LARGE) else 2,
        shared=SHARED,
        temporary=TEMPORARY,
        # After an upgrade, new engines are built next to the old ones, which stay.
        cache=round(2.2 * total) + _OTHER_CACHE
        if builds
        else (_COMPILED if compiles else _UNUSED_CACHE),
        startup=max(int(READY_TIMEOUT), round(startup)),
        further=round(further),
        contexts=estimate_of(manifest, max_batch, on_cpu).contexts_on_host,
    )


def _warm_up(plan: PassPlan) -> float:
    """Return the seconds per layer for running every shape on a GPU and testing whether requests may share passes.

    The trial (runtime/gpu/sharing.py) runs every test canvas alone, alongside others, and in its own pass of every
    width. There are four test canvases, with different expert loads, for every place in the batch; and one for every
    width, after a prompt of that length. With four canvases at 262,144 tokens, the trial takes
    (4 × 4 + 5) × (2 × 0.083 + 0.065 + 4 × 0.009) = 5.6 s, and running every shape takes 2.9 s.
    """
    seconds = sum(_RUNS * _pass(each) for each in plan)
    if not plan.shares:
        return seconds
    compared = 4 * plan.batch + len(plan.widths)
    own = sum(_pass(plan.denoise(width)) for width in plan.widths)
    prompts = plan.batch * _pass(plan.encode(min(128, plan.lengths[-1]), plan.widths[0]))
    return seconds + compared * (2 * _pass(plan.shared()) + own + prompts)


def _pass(shape: PassShape) -> float:
    """Return the seconds per layer that a pass takes at most."""
    canvases = shape.batch * max(1.0, shape.length / 256)
    return canvases * (_LAYER_SECONDS + _CACHED_SECONDS * shape.width)


def target_of(manifest: Manifest) -> Target:
    """Return the target of engines or, for graphs, the first target that suits them."""
    if manifest.target:
        return find_target(manifest.target["name"])
    precision = manifest.options.get("precision", "fp32")
    fitting = (
        each for each in TARGETS if each.builder == "tensorrt" and precision in each.precisions
    )
    return next(fitting, find_target("cpu"))


def overhead(manifest: Manifest) -> int:
    """Return the memory of all processes, without the model's weights and caches."""
    return OVERHEAD + TRIAL + PER_TOKEN * manifest.model.vocab_size


def estimate_of(manifest: Manifest, max_batch: int | None = None, on_cpu: bool = False) -> Estimate:
    """Estimate the device memory for serving, from the bundle's weight and cache formats."""
    options, weights = manifest.options, _weights(manifest, on_cpu)
    model = weights.model if options.get("vision", True) else replace(weights.model, vision=None)
    experts = find_experts(options.get("experts", SLOTTED))
    kv_cache = (options.get("recipe") or {}).get("kv_cache")
    return estimate(replace(weights, model=model), _passes(manifest, max_batch), kv_cache, experts)


def _passes(manifest: Manifest, max_batch: int | None) -> PassPlan:
    """Return a bundle's pass plan: for engines, the plan of their build; for graphs, the plan of a later build."""
    if manifest.passes is not None:
        return passes_of(manifest)
    options = manifest.options
    context = int(
        options.get("max_context") or min(manifest.model.max_position_embeddings, MAX_CONTEXT)
    )
    batch = int(max_batch or options.get("max_batch") or MAX_BATCH)
    chunk = int(options.get("prefill_chunk") or PREFILL_CHUNK)
    experts = find_experts(options.get("experts", SLOTTED))
    return experts.passes(plan_passes(manifest.model, context, batch, chunk))


def _serving_memory(manifest: Manifest, on_cpu: bool, max_batch: int | None) -> int:
    """Return the model's host memory: on a CPU, all of its memory; for a GPU, its largest file plus contexts."""
    need = estimate_of(manifest, max_batch, on_cpu)
    if on_cpu:
        return need.total
    loaded = max((entry["bytes"] for entry in manifest.files.values()), default=0)
    return loaded + need.contexts_on_host


def _weights(manifest: Manifest, on_cpu: bool) -> Weights:
    options = manifest.options
    layers = int(options.get("layers_per_segment") or LAYERS_PER_SEGMENT)
    precision = options.get("precision", "fp32")
    return Weights(manifest.model, precision, _formats(manifest), layers, on_cpu)


def _formats(manifest: Manifest) -> dict[str, str] | None:
    """Return the quantized weights' formats, keyed by name; None if the bundle does not list them."""
    found = {
        name: form
        for entry in manifest.segments
        for name, form in (entry.get("quantized") or {}).items()
    }
    return found or None
