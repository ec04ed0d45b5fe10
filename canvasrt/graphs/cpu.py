"""Rewrites graphs to the form that ONNX Runtime runs fastest on a CPU: rows sorted by expert, INT4 products, layers in
fewer nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from canvasrt.defaults import GEOMETRY
from canvasrt.graphs.cpu_experts import split_experts
from canvasrt.graphs.cpu_sampler import shorten_sampler
from canvasrt.graphs.embedding_table import split_table
from canvasrt.graphs.geometry import split_geometry
from canvasrt.graphs.nbits import use_nbits
from canvasrt.graphs.simplify import simplify_layers


def rewrite_graphs(files: Sequence[Path], bodies: Sequence[Path]) -> tuple[list[Path], Path]:
    """Rewrite graph files. Nodes that depend only on positions move from `bodies`, a subset of `files`, to a new graph.

    Weights stay in their files. Return the rewritten files and the new graph's file.
    """
    models = {file: ir.load(file) for file in files}
    rewritten = [file for file, model in models.items() if rewrite_graph(model) or file in bodies]
    geometry = bodies[0].with_name(f"{GEOMETRY}.onnx")
    ir.save(split_geometry([models[file] for file in bodies]), geometry)
    for file in rewritten:
        # The file may be a link to the graph bundle's file, which must not change.
        file.unlink()
        ir.save(models[file], file)
    return rewritten, geometry


def rewrite_graph(model: ir.Model) -> bool:
    """Rewrite a graph in place. Return whether there was anything to rewrite."""
    steps = (split_experts, use_nbits, split_table, simplify_layers, shorten_sampler)
    changed = [step(model) for step in steps]
    return any(changed)
