"""The Helm chart, by helm's own lint and template and by the Kubernetes API's schemas."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from canvasrt.containers.package.chart import write_chart
from canvasrt.targets import TARGETS, find_target

HELM = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")

# Custom resources, whose schemas are not Kubernetes' own.
CUSTOM = {"ServiceMonitor", "InferenceService"}
EVERYTHING = [
    "autoscaling.enabled=true",
    "serviceMonitor.enabled=true",
    "apiKeys.existingSecret=keys",
    "args={--exit-timeout=20}",
    "image.pullSecrets[0].name=registry",
    "networkPolicy.from[0].podSelector.matchLabels.app=gateway",
    "priorityClassName=high",
    "tolerations[0].key=nvidia.com/gpu",
]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(chart: Path, *settings: str) -> dict[str, dict]:
    """The objects by kind."""
    flags = [part for each in settings for part in ("--set", each)]
    result = helm("template", "release", str(chart), *flags)
    assert result.returncode == 0, result.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(result.stdout) if each}


def check_schemas(objects: dict[str, dict]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for kind, each in objects.items():
        if kind not in CUSTOM:
            validate.validate(each, "1.31", strict=True)


def pod(objects: dict[str, dict]) -> dict:
    workload = objects.get("Deployment") or objects["StatefulSet"]
    return workload["spec"]["template"]["spec"]


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    write_chart(
        tmp_path / "chart", "registry.example:5000/team/canvasrt:1", find_target("rtx-5090")
    )
    return tmp_path / "chart"


def test_helm_lints_every_target(tmp_path: Path) -> None:
    for target in TARGETS:
        write_chart(tmp_path / target.name, "canvasrt:1", target)
        result = helm("lint", "--strict", str(tmp_path / target.name))
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("target", ["cpu", "rtx-5090", "h100", "dgx-spark"])
def test_objects_are_what_kubernetes_takes(tmp_path: Path, target: str) -> None:
    write_chart(tmp_path / "chart", "canvasrt:1", find_target(target))
    check_schemas(render(tmp_path / "chart"))
    check_schemas(render(tmp_path / "chart", *EVERYTHING))


def test_a_gpu_target_asks_for_its_gpu(chart: Path) -> None:
    spec = pod(render(chart))
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    wanted = {each["key"]: each["values"] for each in term["matchExpressions"]}
    assert wanted.pop("nvidia.com/gpu.memory") == [str(int(0.9 * 32e9 / 2**20))]
    assert wanted == {
        "kubernetes.io/arch": ["amd64"],
        "nvidia.com/gpu.compute.major": ["12"],
        "nvidia.com/gpu.compute.minor": ["0"],
    }


def test_the_autoscaler_goes_by_metrics_that_the_models_have(tmp_path: Path) -> None:
    from canvasrt.containers.triton.metrics import GAUGES

    write_chart(tmp_path / "chart", "canvasrt:1", find_target("rtx-5090"), max_batch=8)
    metrics = render(tmp_path / "chart", *EVERYTHING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    pods = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in metrics}
    assert set(pods) == {"canvasrt_requests_waiting", "canvasrt_active_canvases"}
    assert set(pods) <= {f"canvasrt_{name}" for name in GAUGES}
    # A value that is reached before the batch is full, or it would never scale.
    assert pods["canvasrt_active_canvases"]["averageValue"] == "6"


def test_further_arguments_come_after_those_of_the_image(chart: Path) -> None:
    from canvasrt.containers.package.settings import COMMAND

    assert "args" not in pod(render(chart))["containers"][0]
    (container,) = pod(render(chart, "args={--share-passes}"))["containers"]
    words = [word for each in container["args"] for word in each.split("=")]
    assert words == [*COMMAND, "--share-passes"]


def test_a_cpu_target_asks_for_none(tmp_path: Path) -> None:
    write_chart(tmp_path / "chart", "canvasrt:1", find_target("cpu"))
    text = yaml.safe_dump(pod(render(tmp_path / "chart")))
    assert "nvidia" not in text


def test_engines_built_on_their_gpu_are_kept_on_a_volume(tmp_path: Path) -> None:
    write_chart(tmp_path / "chart", "canvasrt:1", find_target("h100"))
    objects = render(tmp_path / "chart")
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    mounts = {
        each["name"]: each["mountPath"] for each in pod(objects)["containers"][0]["volumeMounts"]
    }
    assert mounts[claim["metadata"]["name"]] == "/opt/nim/.cache"
    assert "cache" not in {each["name"] for each in pod(objects)["volumes"]}


def test_the_pod_passes_a_security_review(chart: Path) -> None:
    spec = pod(render(chart))
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_nothing_gets_out_and_only_the_api_in(chart: Path) -> None:
    policy = render(chart)["NetworkPolicy"]["spec"]
    assert policy["egress"] == []
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert ports == {8000, 8001, 8002, 8080}


def test_a_pod_gets_longer_to_stop_than_its_server_takes(chart: Path) -> None:
    from canvasrt.containers.serve.server import EXIT_TIMEOUT

    assert pod(render(chart))["terminationGracePeriodSeconds"] > 2 * EXIT_TIMEOUT


def test_keys_come_from_a_secret_that_exists(chart: Path) -> None:
    spec = pod(render(chart, "apiKeys.existingSecret=keys"))
    assert {"name": "api-keys", "secret": {"secretName": "keys", "defaultMode": 0o440}} in spec[
        "volumes"
    ]


def test_where_keys_are_asked_for_no_port_goes_without(chart: Path) -> None:
    objects = render(chart, "apiKeys.existingSecret=keys")
    policy = objects["NetworkPolicy"]["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == {8000, 8002}
    assert {port["port"] for port in objects["Service"]["spec"]["ports"]} == {8000, 8002}


def test_kserve_takes_the_place_of_the_deployment(chart: Path) -> None:
    objects = render(chart, "kserve.enabled=true", *EVERYTHING)
    assert set(objects) == {"InferenceService", "NetworkPolicy"}
    predictor = objects["InferenceService"]["spec"]["predictor"]
    assert predictor["containers"][0]["image"] == "registry.example:5000/team/canvasrt:1"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kind=DaemonSet", "kind"),
        ("replica=2", "replica"),
        ("terminationGracePeriodSeconds=5", "35"),
    ],
)
def test_a_wrong_value_is_refused(chart: Path, setting: str, said: str) -> None:
    result = helm("template", "release", str(chart), "--set", setting)
    assert result.returncode != 0
    assert said in result.stderr
