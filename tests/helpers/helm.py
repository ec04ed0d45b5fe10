"""Runs helm on a chart, and checks the rendered objects."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.ci import in_ci

HELM = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
needs_helm = pytest.mark.skipif(HELM is None and not in_ci(), reason="helm is not installed")

# Custom resources, which are not in Kubernetes' schemas.
CUSTOM = {"ServiceMonitor", "InferenceService"}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(chart: Path, *settings: str) -> dict[str, dict]:
    """Return the rendered objects by kind."""
    flags = [part for each in settings for part in ("--set", each)]
    result = helm("template", "release", str(chart), *flags)
    assert result.returncode == 0, result.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(result.stdout) if each}


def check_schemas(objects: dict[str, dict]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for kind, each in objects.items():
        if kind not in CUSTOM:
            validate.validate(each, "1.31", strict=True)
