"""Builds engines for the CPU: ONNX Runtime runs the graphs, with experts and quantized products rewritten for speed.

Quantized graphs are lowered first: to the same numbers in float32, or for INT4 to the same codes and scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.defaults import GEOMETRY
from canvasrt.extras import require
from canvasrt.progress import Progress
from canvasrt.staging import link_or_copy, staging

if TYPE_CHECKING:
    from onnx import ModelProto


def build_engines(plan: Plan, graphs: Bundle, progress: Progress) -> Bundle:
    """Write the engine bundle of a plan from its graphs."""
    manifest = graphs.manifest
    with staging(plan.out) as tmp:
        if plan.precision.is_quantized:
            embedding, taken = _lower(graphs, tmp, progress)
        else:
            embedding, taken = manifest.embedding, list(manifest.files)
        for number, name in enumerate(taken):
            progress(f"copying graphs for {plan.target.name}", number, len(taken))
            link_or_copy(graphs.path / name, tmp / name)
        files = [entry["file"] for entry in manifest.segments]
        rewritten = [name for name in files if _rewrite(tmp / name)]
        bodies = [tmp / entry["file"] for entry in manifest.segments if "layers" in entry]
        segments = [*manifest.segments, _split_geometry(bodies)]
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


def _lower(graphs: Bundle, out: Path, progress: Progress) -> tuple[dict[str, Any], list[str]]:
    """Write quantized graphs in float32. Return the embedding table's entry, and the other files to
    link."""
    require("onnx_ir", "export")
    from canvasrt.graphs.lower import lower

    embedding = lower(graphs, out, progress)
    return embedding, [name for name in graphs.manifest.files if not (out / name).exists()]


def _rewrite(file: Path) -> bool:
    """Rewrite layers, INT4 products, an INT8 table and the sampler for a CPU. Weights stay in the linked file."""
    onnx = require("onnx", "export")
    from canvasrt.graphs.experts import split_experts
    from canvasrt.graphs.nbits import use_nbits
    from canvasrt.graphs.sampler import shorten_sampler
    from canvasrt.graphs.simplify import simplify_layers
    from canvasrt.graphs.table import split_table

    model = onnx.load(file, load_external_data=False)
    changed = [
        split_experts(model),
        use_nbits(model),
        split_table(model),
        simplify_layers(model),
        shorten_sampler(model),
    ]
    if not any(changed):
        return False
    _replace(file, model)
    return True


def _split_geometry(bodies: list[Path]) -> dict[str, Any]:
    """Write what positions alone decide as a graph of its own. Return its entry in the manifest."""
    onnx = require("onnx", "export")
    from canvasrt.graphs.geometry import split_geometry

    models = [onnx.load(file, load_external_data=False) for file in bodies]
    folder, name = bodies[0].parent, f"{GEOMETRY}.onnx"
    onnx.save(split_geometry(models, folder), folder / name)
    for file, model in zip(bodies, models, strict=True):
        _replace(file, model)
    return {"name": GEOMETRY, "file": name}


def _replace(file: Path, model: ModelProto) -> None:
    """Write a graph in place of a file, which may be a link to the graph bundle's: it is never written through."""
    onnx = require("onnx", "export")
    file.unlink()
    onnx.save(model, file)
