"""What serving takes of a node, by target and model: memory, CPU, disk, and time to start."""

from __future__ import annotations

from dataclasses import dataclass

from canvasrt.build import memory
from canvasrt.build.needs import builder_memory
from canvasrt.bundle import Manifest
from canvasrt.defaults import LAYERS_PER_SEGMENT, MAX_BATCH, MAX_CONTEXT, PREFILL_CHUNK, SORTED
from canvasrt.targets import Target

MIB, GIB = 1 << 20, 1 << 30
# Triton, its stubs, the front end and the supervisor took 0.19 GB together with the demo model,
# after eight requests (proportional set size, 2 cores).
OVERHEAD = GIB
# The tokenizer and the grammars' index took 0.63 GB for 262,144 made-up tokens, in the model's process and in the one
# that tries grammars. A fork of that may take 1 GiB.
PER_TOKEN = 2 * 2500
TRIAL = GIB
# A server writes 2 MB below /tmp: the models' repository and the Python backend's folder.
TEMPORARY = 256 * MIB
# Triton's Python backend took 4 MB; a region of its shared memory is 1 MB per model to begin with.
SHARED = GIB
# Only a server that builds engines writes to the cache.
_UNUSED_CACHE = GIB
_OTHER_CACHE = 5 * GIB
# Reading engines from a slow network disk, first to hash them and then to load them.
_READ = 100 * 10**6  # bytes per second
_START = 300
# TensorRT-RTX wrote 20.1 GB in 118 s on 4 cores (docs/benchmarks.md), 6 s per GB. TensorRT also
# times its kernels on the GPU, which has not been measured: allow ten times as long.
BUILD_SECONDS_PER_GB = 60
_LARGE = 10**9  # bytes of weights from which a CPU gains from more than two cores


@dataclass(frozen=True)
class ReplicaSizes:
    """Bytes, whole cores, and seconds until a replica must be ready.

    `memory` is the host's, without `shared` (/dev/shm); `temporary` is /tmp.
    """

    memory: int
    cpu: int
    shared: int
    temporary: int
    cache: int
    startup: int


def sizes_of(manifest: Manifest, target: Target, max_batch: int | None = None) -> ReplicaSizes:
    """Return the sizes for a bundle on a target, with up to `max_batch` canvases at a time.

    A bundle of graphs for a GPU is built at the first start, which takes longer and needs the
    builder's memory.
    """
    on_cpu = target.capability is None
    builds = manifest.kind == "graphs" and not on_cpu
    weights = _segments(manifest, on_cpu)
    total = sum(weights.values())
    need = _serving_memory(manifest, on_cpu, max_batch)
    startup = _START + 2 * total / _READ
    if builds:
        kinds = (_formats(manifest) or {}).values()
        need = max(need, *(builder_memory(*each, kinds) for each in weights.items()))
        startup += total / 1e9 * BUILD_SECONDS_PER_GB
    return ReplicaSizes(
        memory=overhead(manifest) + need,
        cpu=4 if builds or (on_cpu and total > _LARGE) else 2,
        shared=SHARED,
        temporary=TEMPORARY,
        # After an upgrade, new engines are built beside the old ones.
        cache=round(2.2 * total) + _OTHER_CACHE if builds else _UNUSED_CACHE,
        startup=round(startup),
    )


def overhead(manifest: Manifest) -> int:
    """Return what all processes take beside the model."""
    return OVERHEAD + TRIAL + PER_TOKEN * manifest.model.vocab_size


def estimate_of(
    manifest: Manifest, context: int, batch: int, on_cpu: bool = False
) -> memory.Estimate:
    """Estimate the memory that serving takes on the device, from the bundle's formats and cache."""
    return memory.estimate(
        manifest.model,
        _precision(manifest),
        context,
        batch,
        on_cpu=on_cpu,
        formats=_formats(manifest),
        kv_cache=(manifest.options.get("recipe") or {}).get("kv_cache"),
        layers_per_segment=_layers(manifest),
        prefill_chunk=int(manifest.options.get("prefill_chunk") or PREFILL_CHUNK),
        sees=manifest.options.get("vision", True),
        sorts_rows=manifest.options.get("experts") == SORTED,
    )


def _serving_memory(manifest: Manifest, on_cpu: bool, max_batch: int | None) -> int:
    """Return the host's share: everything on a CPU; for a GPU, the file that is being loaded."""
    if not on_cpu:
        return max((entry["bytes"] for entry in manifest.files.values()), default=0)
    limit = min(manifest.model.max_position_embeddings, MAX_CONTEXT)
    context = int(manifest.options.get("max_context") or limit)
    batch = int(max_batch or manifest.options.get("max_batch") or MAX_BATCH)
    return estimate_of(manifest, context, batch, on_cpu=True).total


def _segments(manifest: Manifest, on_cpu: bool) -> dict[str, int]:
    return memory.segment_bytes(
        manifest.model, _precision(manifest), _layers(manifest), _formats(manifest), on_cpu
    )


def _precision(manifest: Manifest) -> str:
    return manifest.options.get("precision", "fp32")


def _layers(manifest: Manifest) -> int:
    return int(manifest.options.get("layers_per_segment") or LAYERS_PER_SEGMENT)


def _formats(manifest: Manifest) -> dict[str, str] | None:
    """Return the format of each quantized weight; None if the bundle names none."""
    found = {
        name: form
        for entry in manifest.segments
        for name, form in (entry.get("quantized") or {}).items()
    }
    return found or None
