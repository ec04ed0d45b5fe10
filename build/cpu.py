"""Builds bundles for the CPU: graphs for ONNX Runtime, in which experts and quantized products are rewritten for speed.

Quantized graphs are lowered first: their weights are dequantized to float32, except INT4 weights, which keep their
codes and scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.cache import EXPORTED_BY, kept_piece, unfinished, unfinished_folder, versions
from canvasrt.defaults import GEOMETRY
from canvasrt.extras import require
from canvasrt.progress import report
from canvasrt.staging import link_or_copy, staging
from canvasrt.types import Json


def build_engines(plan: Plan, graphs: Bundle) -> Bundle:
    """Write the engine bundle of a plan from its graphs."""
    manifest = graphs.manifest
    with unfinished(*lowered_from(graphs)) as room, staging(plan.out) as tmp:
        if plan.precision.is_quantized:
            embedding, taken = _lower(graphs, tmp, room, plan.spends_graphs)
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


def lowered_from(graphs: Bundle) -> tuple[str, Json]:
    """Return a lowering's key in the cache: the kind of work, and all inputs that determine the result."""
    return "lowerings", {"graphs": graphs.manifest.digest, "made_by": versions(EXPORTED_BY)}


def built_weights(plan: Plan, graphs: Bundle) -> set[str]:
    """Return the weight files that a build does not have to read, because an interrupted build has already lowered
    the graphs that use them."""
    room = unfinished_folder(*lowered_from(graphs))
    files = [Path(each["file"]) for each in graphs.manifest.segments]
    return {str(each.with_suffix(".bin")) for each in files if (room / each.stem).is_dir()}


def _lower(graphs: Bundle, out: Path, room: Path, spend: bool) -> tuple[dict[str, Any], list[str]]:
    """Lower the quantized graphs to float32, except those that `room` already has. If `spend` is true, remove each
    graph's weights afterwards. Return the embedding table's manifest entry, and the files that are still to be
    linked."""
    require("onnx_ir", "export")
    from canvasrt.graphs.embedding_table import embedding_entry, host_head_of
    from canvasrt.graphs.lower import lower_graph

    files = {segment["name"]: segment["file"] for segment in graphs.manifest.segments}
    for number, name in enumerate(files.values()):
        report("lowering graphs for a CPU", number, len(files))
        source = graphs.file(name)

        def write(folder: Path, source: Path = source) -> None:
            lower_graph(source, folder / source.name)

        kept_piece(room / source.stem, write, out)
        if spend:
            source.with_suffix(".bin").unlink(missing_ok=True)
    embedding = embedding_entry(out / files["head"]) | host_head_of(graphs.manifest.embedding)
    return embedding, [name for name in graphs.manifest.files if not (out / name).exists()]


def _rewrite(
    segments: list[dict[str, Any]], folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rewrite the graphs for a CPU. Return the manifest entries of all segments, and the names of changed files. One
    segment is new: it computes values that depend only on positions."""
    require("onnx_ir", "export")
    from canvasrt.graphs.cpu import rewrite_graphs

    files = [folder / entry["file"] for entry in segments]
    bodies = [folder / entry["file"] for entry in segments if "layers" in entry]
    rewritten, geometry = rewrite_graphs(files, bodies)
    entry = {"name": GEOMETRY, "file": geometry.name}
    return [*segments, entry], [file.name for file in rewritten]
