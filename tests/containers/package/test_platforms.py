"""The chart on OpenShift and KServe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.helpers.helm import helm, needs_helm, render

pytestmark = needs_helm


def test_openshift_chooses_the_user(chart: Path) -> None:
    """Its default constraint, restricted-v2, refuses a pod that names another user or group."""

    def context(*more: str) -> dict[str, Any]:
        result = helm("template", "release", str(chart), *more)
        objects = [each for each in yaml.safe_load_all(result.stdout) if each]
        (pods,) = [each for each in objects if each["kind"] == "StatefulSet"]
        return pods["spec"]["template"]["spec"]["securityContext"]

    ids = {"runAsUser", "runAsGroup", "fsGroup"}
    chosen = context("--api-versions", "security.openshift.io/v1")
    assert chosen == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert set(context()) - set(chosen) == ids


def test_kserve_frees_the_gpu_before_it_starts_a_new_replica(chart: Path) -> None:
    """By default, it starts the new replica first, which waits forever for the old one's GPU."""
    service = render(chart, "kserve.enabled=true")["InferenceService"]
    strategy = service["spec"]["predictor"]["deploymentStrategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
