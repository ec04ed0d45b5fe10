"""Builds bundles for the CPU: graphs for ONNX Runtime, with experts and quantized products rewritten for speed.

Quantized graphs are lowered first: weights become the same numbers in float32; INT4 weights keep their codes and
scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.defaults import GEOMETRY
from canvasrt.extras import require
from canvasrt.progress import report
from canvasrt.staging import link_or_copy, staging


def build_engines(plan: Plan, graphs: Bundle) -> Bundle:
    """Write the engine bundle of a plan from its graphs."""
    manifest = graphs.manifest
    with staging(plan.out) as tmp:
        if plan.precision.is_quantized:
            embedding, taken = _lower(graphs, tmp)
        else:
            embedding, taken = manifest.embedding, list(manifest.files)
        for number, name in enumerate(taken):
            report(f"copying graphs for {plan.target.name}", number, len(taken))
            link_or_copy(graphs.path / name, tmp / name)
        segments, rewritten = _rewrite(manifest.segments, tmp)
        write_manifest(
            tmp,
            kind="engines",
            made_from={"source": plan.source.made_from},
            options={**manifest.options, **plan.options},
            model=manifest.model,
            sampler=manifest.sampler,
            segments=segments,
            embedding=embedding,
            tokenizer=manifest.tokenizer,
            target={"name": plan.target.name, "backend": "onnxruntime"},
            packages=("onnxruntime",),
            known={name: manifest.files[name] for name in taken if name not in rewritten},
        )
    return load_bundle(plan.out, kind="engines", check=False)


def _lower(graphs: Bundle, out: Path) -> tuple[dict[str, Any], list[str]]:
    """Write quantized graphs in float32. Return the embedding table's manifest entry, and the other files to link."""
    require("onnx_ir", "export")
    from canvasrt.graphs.lower import lower

    embedding = lower(graphs, out)
    return embedding, [name for name in graphs.manifest.files if not (out / name).exists()]


def _rewrite(
    segments: list[dict[str, Any]], folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rewrite the graphs for a CPU. Return the segments, including the new one for values that only depend on
    positions, and the changed files."""
    require("onnx_ir", "export")
    from canvasrt.graphs.cpu import rewrite_graphs

    files = [folder / entry["file"] for entry in segments]
    bodies = [folder / entry["file"] for entry in segments if "layers" in entry]
    rewritten, geometry = rewrite_graphs(files, bodies)
    entry = {"name": GEOMETRY, "file": geometry.name}
    return [*segments, entry], [file.name for file in rewritten]
