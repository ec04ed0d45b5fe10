"""Writes the Helm chart of a package: the template with the values for one image and target."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

from canvasrt import __version__
from canvasrt.containers.names import ARCHITECTURES
from canvasrt.containers.package.sizes import GIB, ReplicaSizes
from canvasrt.targets import Target

CHART = "chart"
_TEMPLATE = Path(__file__).parent.parent / "templates" / CHART
# GPUs report slightly less than their nominal memory.
_REPORTED = 0.9
# A replica's memory limit, as a multiple of the memory that it requests.
_SPARE = 1.5
_LOGS = GIB  # disk space for a replica's log before it is rotated


def write_chart(
    out: Path,
    image: str,
    target: Target,
    max_batch: int | None = None,
    sizes: ReplicaSizes | None = None,
) -> None:
    """Write the chart to the new folder `out`.

    `image` is `[REGISTRY/]NAME[:TAG]`. On a GPU the chart has a StatefulSet, whose volumes keep built engines and
    compiled kernels across restarts. `max_batch`, the number of canvases that are denoised together, determines the
    autoscaler's threshold; `sizes` determines the resources. If either is None, its values
    stay as in the template.
    """
    shutil.copytree(_TEMPLATE, out)
    values = (out / "values.yaml").read_text(encoding="utf-8")
    for name, value in _values(image, target, max_batch, sizes).items():
        values = _set(values, name, value)
    (out / "values.yaml").write_text(values, encoding="utf-8")
    chart = (out / "Chart.yaml").read_text(encoding="utf-8")
    for name in ("version", "appVersion"):
        chart = _set(chart, name, f'"{__version__}"')
    (out / "Chart.yaml").write_text(chart, encoding="utf-8")


def _values(
    image: str, target: Target, max_batch: int | None, sizes: ReplicaSizes | None
) -> dict[str, Any]:
    """Return values, keyed by their path in values.yaml."""
    repository, tag = _split(image)
    on_gpu = target.capability is not None
    values = {
        "image.repository": f'"{repository}"',
        "image.tag": f'"{tag}"',
        "target": target.name,
        "node.arch": ARCHITECTURES.get(target.host, "amd64"),
        "node.capability": f'"{target.capability_text if on_gpu else ""}"',
        "node.memoryMiB": 0 if target.unified else int(_REPORTED * (target.memory or 0) / 2**20),
        "kind": "StatefulSet" if on_gpu else "Deployment",
    }
    if max_batch is not None:
        values["autoscaling.activeCanvases"] = max(1, max_batch * 3 // 4)
    if sizes is not None:
        values |= _resources(sizes, on_volume=on_gpu)
    return values


def _resources(sizes: ReplicaSizes, on_volume: bool) -> dict[str, Any]:
    # Kubernetes counts /dev/shm as memory, and folders outside of volumes as ephemeral storage.
    memory = sizes.memory + sizes.shared
    stored = sizes.temporary + _LOGS + (0 if on_volume else sizes.cache)
    return {
        "resources.requests.cpu": sizes.cpu,
        "resources.requests.memory": _gib(memory),
        "resources.requests.ephemeral-storage": _gib(stored),
        "resources.limits.memory": _gib(memory * _SPARE),
        "resources.limits.ephemeral-storage": _gib(stored),
        "sharedMemory": f"{sizes.shared >> 20}Mi" if sizes.shared % 2**30 else _gib(sizes.shared),
        "temporary": f"{sizes.temporary >> 20}Mi",
        "cache.size": _gib(sizes.cache),
        "startupSeconds": sizes.startup,
        "furtherGpuSeconds": sizes.further,
        "furtherGpuGi": math.ceil(sizes.contexts / GIB),
    }


def _gib(size: float) -> str:
    return f"{math.ceil(size / 2**30)}Gi"


def _split(image: str) -> tuple[str, str]:
    """Split an image's name into repository and tag. A colon before the last slash precedes a port."""
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "")


def _set(text: str, path: str, value: Any) -> str:
    """Return YAML text with the value at a path replaced. Comments are kept."""
    place = 0
    keys = path.split(".")
    for depth, key in enumerate(keys):
        match = re.compile(rf"(?m)^{'  ' * depth}{re.escape(key)}:").search(text, place)
        if match is None:
            raise ValueError(f"values.yaml has no {path}")
        place = match.end()
    end = text.index("\n", place)
    return f"{text[:place]} {value}{text[end:]}"
