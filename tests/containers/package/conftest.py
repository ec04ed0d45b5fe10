"""Fixtures: engines with another target in their manifest, and Helm charts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle, write_manifest
from canvasrt.containers.package.chart import write_chart
from canvasrt.targets import find_target
from tests.helpers.helm import check_schemas, render

Relabelled = Callable[..., Path]


Rendered = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """The chart for an RTX 5090."""
    write_chart(
        tmp_path / "chart", "registry.example:5000/team/canvasrt:1", find_target("rtx-5090")
    )
    return tmp_path / "chart"


@pytest.fixture
def rendered(tmp_path: Path) -> Rendered:
    """Return a function that renders a target's chart, checks its objects by Kubernetes' schemas, and returns them by
    kind."""

    def make(target: str = "rtx-5090", *settings: str, **options: Any) -> dict[str, dict[str, Any]]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "chart"
        write_chart(folder, "registry.example:5000/team/canvasrt:1", find_target(target), **options)
        objects = render(folder, *settings)
        check_schemas(objects)
        return objects

    return make


@pytest.fixture
def relabelled(engines: Bundle, tmp_path: Path) -> Relabelled:
    """Return a function that copies the CPU's engines and changes the target in their manifest, to package them as if
    for a GPU."""

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
