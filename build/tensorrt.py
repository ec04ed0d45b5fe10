"""Builds engines for NVIDIA GPUs. TensorRT-RTX builds them on any machine; TensorRT needs the target's GPU."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from canvasrt.build import compile, pieces
from canvasrt.build.compile import Children, Job
from canvasrt.build.needs import SHARE, builder_memory, builders_at_once, check_memory_here
from canvasrt.build.parallel import ParallelTask, run_all
from canvasrt.build.plan import Plan
from canvasrt.build.profile_ranges import Profile, profiles, to_json
from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.cache import EngineCache, cache_folder, code_hash, key_of
from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.hashes import hash_files
from canvasrt.machine import (
    BUILDER_MODULES,
    VISIBLE,
    available_bytes,
    building_gpu,
    gpus,
    return_freed_memory,
)
from canvasrt.progress import report
from canvasrt.roofline import dims, fused_attention, parse, resolve, store, tensor_shapes
from canvasrt.staging import link_or_copy, staging
from canvasrt.types import Json


@dataclass(frozen=True)
class SegmentBuild:
    """One engine to build. `weights` is its weights' size in bytes, `formats` its weights' formats, `sizes` its
    profiles, and `made_from` everything that determines the engine."""

    name: str
    graph: Path
    weights: int
    formats: Sequence[str]
    sizes: Mapping[str, Profile]
    made_from: Json

    @property
    def file(self) -> str:
        return f"{self.name}.engine"

    @property
    def kernels(self) -> str:
        """The file of the kernel list."""
        return f"{self.name}{store.KERNELS_SUFFIX}"


def build_engines(plan: Plan, graphs: Bundle) -> Bundle:
    """Write the engine bundle of a plan from its graphs. Builds segments in parallel if memory allows."""
    manifest, target = graphs.manifest, _target(plan)
    entries = [each for each in manifest.segments if each["name"] != "vision" or plan.reading.sees]
    with staging(plan.out) as tmp:
        # For each segment, the engines to build: several if the segment is cut into pieces.
        builds = [_segment(plan, graphs, entry, target, tmp / _PIECES) for entry in entries]
        each_engine = [each for found in builds for each in found]
        made = _engines(plan, each_engine, tmp)
        shutil.rmtree(tmp / _PIECES, ignore_errors=True)
        _check_workspace(plan, made)
        known = {
            each.file: {name: made[each.name][name] for name in ("sha256", "bytes")}
            for each in each_engine
        }
        described = [
            _described(plan, graphs, entry, found, made, tmp)
            for entry, found in zip(entries, builds, strict=True)
        ]
        taken = [manifest.embedding["file"], *(manifest.tokenizer or ())]
        if host_head := manifest.embedding.get("host_head"):
            taken.append(host_head["file"])
        for name in taken:
            link_or_copy(graphs.file(name), tmp / name)
            known[name] = manifest.files[name]
        write_manifest(
            tmp,
            kind="engines",
            made_from={"source": plan.source.made_from},
            options={**manifest.options, **plan.options},
            model=manifest.model,
            sampler=manifest.sampler,
            segments=described,
            embedding=manifest.embedding,
            tokenizer=manifest.tokenizer,
            target=target,
            passes=plan.passes.to_json(),
            packages=(plan.target.builder, *plan.experts.packages),
            known=known,
        )
    return load_bundle(plan.out, kind="engines", check=False)


def built_weights(plan: Plan, graphs: Bundle) -> set[str]:
    """Return the weight files that a build does not have to read, because their engines are in the cache."""
    if not plan.experts.in_engines:
        return set()
    target, cache = _target(plan), EngineCache()
    return {
        str(Path(entry["file"]).with_suffix(".bin"))
        for entry in graphs.manifest.segments
        if (entry["name"] != "vision" or plan.reading.sees)
        and all(
            cache.find(each.made_from)
            for each in _segment(plan, graphs, entry, target, Path(_PIECES))
        )
    }


def _target(plan: Plan) -> Json:
    """Return the target's entry in the manifest."""
    module = require(*BUILDER_MODULES[plan.target.builder])
    return {
        "name": plan.target.name,
        "backend": plan.target.builder,
        "builder_version": module.__version__,
        "compute_capability": plan.target.capability_text,
        # TensorRT does not document whether engines are portable between host architectures.
        "built_on": platform.machine(),
    }


def _segment(
    plan: Plan, graphs: Bundle, entry: Json, target: Json, folder: Path
) -> list[SegmentBuild]:
    """Return the engines to build for a segment: one, or one per piece. The pieces' graphs are written to `folder`."""
    sizes = profiles(entry, graphs.manifest.model, plan.passes)
    whole = "layers" not in entry or plan.experts.in_engines
    if not whole:
        sizes = plan.experts.profiles(sizes)
    made_from = {
        "code": _code(),
        "graph": {name: graphs.manifest.files[name]["sha256"] for name in _files(graphs, entry)},
        "precision": plan.precision.name,
        "profiles": to_json(sizes),
        # The target's name is left out, because TensorRT-RTX's engines only depend on its GPU's capabilities.
        **{name: value for name, value in target.items() if name != "name"},
    }
    # TensorRT's engines are for the kind of GPU on which they were built.
    if gpu := building_gpu(plan.target):
        made_from["gpu"] = gpu.name
    formats = tuple((entry.get("quantized") or {}).values())
    if whole:
        weights = sum(graphs.manifest.files[name]["bytes"] for name in _files(graphs, entry))
        file = graphs.file(entry["file"])
        return [SegmentBuild(entry["name"], file, weights, formats, sizes, made_from)]
    folder.mkdir(exist_ok=True)
    made = pieces.write_pieces(graphs, entry, folder)
    hashes = hash_files(folder, [each.file.name for each in made])
    return [
        SegmentBuild(
            each.name,
            each.file,
            each.weights,
            formats,
            sizes,
            made_from | {"piece": hashes[each.file.name]},
        )
        for each in made
    ]


def _engines(plan: Plan, segments: list[SegmentBuild], out: Path) -> dict[str, Json]:
    """Write every engine to `out`, from the cache if possible. Return `sha256`, `bytes` and `facts` by engine name."""
    cache = EngineCache()
    made: dict[str, Json] = {}
    tasks: list[ParallelTask[Json]] = []
    children = Children()
    for each in segments:
        if found := cache.find(each.made_from):
            report(f"reusing {each.name} for {plan.target.name}", 1, 1)
            link_or_copy(found[0], out / each.file)
            if kernels := cache.kernels(each.made_from):
                link_or_copy(kernels, out / each.kernels)
            made[each.name] = found[1]
            _spend(plan, each)
            continue
        need = builder_memory(each.name, each.weights, each.formats)
        check_memory_here(each.name, need)
        tasks.append(ParallelTask(each.name, need, _builder(plan, each, out, cache, children)))
    return_freed_memory()
    made |= run_all(
        # The largest engine is built first, because it determines the total time.
        sorted(tasks, key=lambda task: -task.memory),
        available_bytes() // SHARE,
        builders_at_once(plan.target),
        started=lambda name: report(f"building {name} for {plan.target.name}", 0, 1),
        finished=lambda name: report(f"building {name} for {plan.target.name}", 1, 1),
        stop=children.kill,
    )
    return made


def _builder(
    plan: Plan,
    segment: SegmentBuild,
    out: Path,
    cache: EngineCache,
    children: Children,
) -> Any:
    """Return a function that builds one engine, to be called on a thread."""
    module, _ = BUILDER_MODULES[plan.target.builder]
    capabilities = plan.target.capabilities if plan.target.builds_anywhere else ()
    gpu = building_gpu(plan.target)
    # A process that is restricted to a MIG instance sees no other GPU.
    several = len(gpus()) > 1 and "MIG-" not in os.environ.get(VISIBLE, "")
    uuid = gpu.uuid if gpu and several else ""
    engine = out / segment.file
    timing = None if plan.target.builds_anywhere else _timings(segment.made_from)

    def run() -> Json:
        job = Job(module, segment.graph, engine, capabilities, segment.sizes, timing, uuid)
        facts = {"activation_bytes": compile.compile_graph(job, children)}
        listed = job.kernels if job.kernels.is_file() else None
        kept = cache.keep(segment.made_from, engine, facts, listed)
        _spend(plan, segment)
        return kept

    return run


def _spend(plan: Plan, segment: SegmentBuild) -> None:
    """Remove a graph's weights, which are not needed any more, unless the plan keeps them."""
    if plan.spends_graphs:
        segment.graph.with_suffix(".bin").unlink(missing_ok=True)


def _timings(made_from: Json) -> Path:
    """Return the file of the timing cache that belongs to a builder's version and a GPU."""
    about = {
        name: made_from.get(name)
        for name in ("builder_version", "compute_capability", "built_on", "gpu")
    }
    return cache_folder() / "timing" / key_of(about)


# During the build, a folder of this name contains the pieces' graphs.
_PIECES = "pieces"
# Activations are allowed to exceed the plan by this many bytes, because the plan does not count small tensors.
_UNCOUNTED = 1 << 28


def _check_workspace(plan: Plan, made: Mapping[str, Json]) -> None:
    """Raise CanvasError if activations take so much more memory than planned that serving exceeds the target's memory.

    This happens if a builder orders operators so that a whole layer's intermediate results exist at the same time.
    """
    needs = {name: each["facts"]["activation_bytes"] or 0 for name, each in made.items()}
    name = max(needs, key=lambda each: needs[each])
    planned, room = plan.memory, plan.target.memory
    excess = needs[name] - planned.workspace
    total = planned.total + excess
    if room is not None and excess > _UNCOUNTED and planned.total <= room < total:
        raise CanvasError(
            f"{name} needs {needs[name] / 1e9:.1f} GB for activations, not the planned {planned.workspace / 1e9:.1f} GB. So "
            f"serving takes {total / 1e9:.1f} GB, but {plan.target.name} has {room / 1e9:.1f} GB",
            "build with a smaller --max-context or --max-batch, and report the builder's version",
        )


def _described(
    plan: Plan,
    graphs: Bundle,
    entry: Json,
    builds: Sequence[SegmentBuild],
    made: Mapping[str, Json],
    out: Path,
) -> Json:
    """Return a segment's entry in the engines' manifest. If the segment was cut into pieces, join them first."""
    first, *others = builds
    sizes = {"profiles": to_json(first.sizes)}
    if not others:
        found = made[first.name]
        listed = {"kernels": first.kernels} if "kernels" in found else {}
        return {**entry, "file": first.file, **sizes, **found["facts"], **listed}
    hashes = {each.file: made[each.name]["sha256"] for each in builds}
    joined = pieces.join_pieces(graphs, entry, hashes, plan.target.capabilities, out)
    needs = [made[each.name]["facts"]["activation_bytes"] or 0 for each in builds]
    return {**entry, **sizes, "activation_bytes": max(needs), **joined}


def _files(graphs: Bundle, entry: Json) -> list[str]:
    """Return the files that hold a segment's graph and its weights."""
    names = [entry["file"], str(Path(entry["file"]).with_suffix(".bin"))]
    if entry["name"] == "head":
        names.append(graphs.manifest.embedding["file"])
    return [name for name in names if name in graphs.manifest.files]


@cache
def _code() -> str:
    """Return a hash of the code that builds engines, so that a change of this code invalidates the cache."""
    listing = (dims, fused_attention, parse, resolve, tensor_shapes, store)
    return code_hash([Path(str(each.__file__)) for each in (compile, *listing)])
