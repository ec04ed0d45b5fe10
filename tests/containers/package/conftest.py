"""Engines with another target in their manifest, and a chart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle, write_manifest
from canvasrt.containers.package.chart import write_chart
from canvasrt.targets import find_target

Relabelled = Callable[..., Path]


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """The chart for an RTX 5090."""
    write_chart(
        tmp_path / "chart", "registry.example:5000/team/canvasrt:1", find_target("rtx-5090")
    )
    return tmp_path / "chart"


@pytest.fixture
def relabelled(engines: Bundle, tmp_path: Path) -> Relabelled:
    """The CPU's engines under another target, to package them as if for a GPU."""

    def make(name: str, backend: str = "", version: str = "", **options: Any) -> Path:
        folder = tmp_path / "relabelled" / (name or "graphs")
        shutil.copytree(engines.path, folder)
        (folder / "manifest.json").unlink()
        manifest = engines.manifest
        target = {"name": name, "backend": backend, "builder_version": version}
        write_manifest(
            folder,
            kind="engines" if name else "graphs",
            made_from=manifest.made_from,
            options={**manifest.options, **options},
            model=manifest.model,
            sampler=manifest.sampler,
            segments=manifest.segments,
            embedding=manifest.embedding,
            tokenizer=manifest.tokenizer,
            target=target if name else None,
        )
        return folder

    return make
