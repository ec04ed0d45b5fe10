"""The Helm chart of a package: the template, with the values of one image and target."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from canvasrt import __version__
from canvasrt.targets import Target

CHART = "chart"
_TEMPLATE = Path(__file__).parent.parent / "templates" / CHART
_ARCHITECTURES = {"x86_64": "amd64", "any": "amd64", "aarch64": "arm64"}
# GPUs report slightly less than their nominal memory.
_REPORTED = 0.9


def write_chart(out: Path, image: str, target: Target, max_batch: int | None = None) -> None:
    """Write the chart to the new folder `out`.

    `image` is `[REGISTRY/]NAME[:TAG]`. Engines built on their GPU get a StatefulSet, whose volumes
    keep them over restarts; others are in the image. The autoscaler's limit depends on `max_batch`,
    how many canvases are denoised together; None keeps the template's value.
    """
    shutil.copytree(_TEMPLATE, out)
    values = (out / "values.yaml").read_text(encoding="utf-8")
    for name, value in _values(image, target, max_batch).items():
        values = _set(values, name, value)
    (out / "values.yaml").write_text(values, encoding="utf-8")
    chart = (out / "Chart.yaml").read_text(encoding="utf-8")
    for name in ("version", "appVersion"):
        chart = _set(chart, name, f'"{__version__}"')
    (out / "Chart.yaml").write_text(chart, encoding="utf-8")


def _values(image: str, target: Target, max_batch: int | None) -> dict[str, Any]:
    repository, tag = _split(image)
    on_gpu = target.capability is not None
    values = {
        "repository": f'"{repository}"',
        "tag": f'"{tag}"',
        "target": target.name,
        "arch": _ARCHITECTURES[target.host],
        "capability": f'"{target.capability_text if on_gpu else ""}"',
        "memoryMiB": int(_REPORTED * target.memory / 2**20) if target.memory else 0,
        "kind": "Deployment" if target.builds_anywhere else "StatefulSet",
    }
    if max_batch is not None:
        values["activeCanvases"] = max(1, max_batch * 3 // 4)
    return values


def _split(image: str) -> tuple[str, str]:
    """Split an image's name into repository and tag. A colon before the last slash precedes a port."""
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "")


def _set(text: str, name: str, value: Any) -> str:
    """Return YAML text with a key's value replaced; the comments stay for the user."""
    changed, count = re.subn(rf"(?m)^( *{name}:) .*$", rf"\1 {value}", text, count=1)
    assert count, name
    return changed
