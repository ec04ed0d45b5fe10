"""Engines for NVIDIA GPUs: TensorRT-RTX for RTX, ahead of time and without a GPU; TensorRT for the rest, on the GPU."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canvasrt.build.cache import EngineCache, take_over
from canvasrt.build.compile import Job, compile_graph
from canvasrt.build.plan import Plan
from canvasrt.build.profiles import Profile, profile
from canvasrt.bundle import Bundle, load_bundle, staging, write_manifest
from canvasrt.extras import require
from canvasrt.machine import BUILDER_MODULES
from canvasrt.progress import Progress

# Raised when the way that engines are built changes, so that none of the old ones is taken from the cache.
RECIPE = 1


def build_engines(plan: Plan, graphs: Bundle, progress: Progress) -> Bundle:
    """Write the engine bundle of a plan from its graphs, a segment after the other."""
    module = require(*BUILDER_MODULES[plan.target.builder])
    manifest = graphs.manifest
    target = {
        "name": plan.target.name,
        "backend": plan.target.builder,
        "builder_version": module.__version__,
        "compute_capability": plan.target.capability_text,
        # Whether an engine is the same on another architecture of the host is not documented.
        "built_on": platform.machine(),
    }
    cache = EngineCache()
    with staging(plan.out) as tmp:
        segments, known = [], {}
        for entry in manifest.segments:
            sizes = profile(entry, manifest.model, plan.max_context, plan.max_batch)
            file = f"{entry['name']}.engine"
            known[file] = _engine(plan, graphs, entry, sizes, target, cache, tmp / file, progress)
            profiles = [{name: each.to_json() for name, each in sizes.items()}]
            segments.append({**entry, "file": file, "profiles": profiles})
        for name in (manifest.embedding["file"], *(manifest.tokenizer or ())):
            take_over(graphs.file(name), tmp / name)
            known[name] = manifest.files[name]
        write_manifest(
            tmp,
            kind="engines",
            made_from={"source": plan.source.made_from},
            options={**manifest.options, **plan.options},
            model=manifest.model,
            sampler=manifest.sampler,
            segments=segments,
            embedding=manifest.embedding,
            tokenizer=manifest.tokenizer,
            target=target,
            packages=(plan.target.builder,),
            known=known,
        )
    return load_bundle(plan.out, kind="engines", check=False)


def _engine(
    plan: Plan,
    graphs: Bundle,
    entry: Mapping[str, Any],
    sizes: Profile,
    target: Mapping[str, Any],
    cache: EngineCache,
    out: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Put a segment's engine at `out`, from the cache when it is there; its `sha256` and `bytes`."""
    made_from = {
        "recipe": RECIPE,
        "graph": {name: graphs.manifest.files[name]["sha256"] for name in _files(graphs, entry)},
        "precision": plan.precision,
        "profile": {name: each.to_json() for name, each in sizes.items()},
        # An engine depends on the capability and not on the target's name.
        **{name: value for name, value in target.items() if name != "name"},
    }
    if found := cache.find(made_from):
        progress(f"reusing {entry['name']} for {plan.target.name}", 1, 1)
        take_over(found[0], out)
        return found[1]
    progress(f"building {entry['name']} for {plan.target.name}", 0, 1)
    module, _ = BUILDER_MODULES[plan.target.builder]
    capability = plan.target.capability if plan.target.builds_anywhere else None
    compile_graph(Job(module, graphs.file(entry["file"]), out, capability, sizes))
    progress(f"building {entry['name']} for {plan.target.name}", 1, 1)
    return cache.keep(made_from, out)


def _files(graphs: Bundle, entry: Mapping[str, Any]) -> list[str]:
    """The files that hold a segment's graph and its weights."""
    names = [entry["file"], str(Path(entry["file"]).with_suffix(".bin"))]
    if entry["name"] == "head":
        names.append(graphs.manifest.embedding["file"])
    return [name for name in names if name in graphs.manifest.files]
