"""Engines for the CPU: ONNX Runtime runs the fp32 graphs as they are, so they are taken over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle, load_bundle, staging, write_manifest
from canvasrt.progress import Progress


def build_engines(plan: Plan, graphs: Bundle, progress: Progress) -> Bundle:
    """Write the engine bundle of a plan from its graphs."""
    manifest = graphs.manifest
    with staging(plan.out) as tmp:
        for number, name in enumerate(manifest.files):
            progress(f"taking over graphs for {plan.target.name}", number, len(manifest.files))
            _take_over(graphs.path / name, tmp / name)
        write_manifest(
            tmp,
            kind="engines",
            made_from={"source": plan.source.made_from},
            options={**manifest.options, **plan.options},
            model=manifest.model,
            sampler=manifest.sampler,
            segments=manifest.segments,
            embedding=manifest.embedding,
            tokenizer=manifest.tokenizer,
            target={"name": plan.target.name, "backend": "onnxruntime"},
            packages=("onnxruntime",),
            known=manifest.files,
        )
    return load_bundle(plan.out, kind="engines", check=False)


def _take_over(source: Path, destination: Path) -> None:
    """Link a file, which takes no space; copy it where the disk is another."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
