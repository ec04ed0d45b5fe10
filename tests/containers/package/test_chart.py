"""The Helm chart, checked by helm's lint and template and by the schemas of the Kubernetes API."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from canvasrt.containers.names import CHECK_TIMEOUT, FAILED_CHECKS
from canvasrt.containers.package.chart import write_chart
from canvasrt.containers.package.image_settings import COMMAND, STOP_GRACE, Health
from canvasrt.containers.package.sizes import ReplicaSizes
from canvasrt.containers.serve import frontend
from canvasrt.containers.triton.metrics import GAUGES
from canvasrt.targets import TARGETS
from tests.containers.package.conftest import Rendered
from tests.helpers.helm import check_schemas, helm, needs_helm, render

pytestmark = needs_helm

PEERS = (
    "networkPolicy.from[0].podSelector.matchLabels.app=gateway",
    "networkPolicy.monitoring[0].podSelector.matchLabels.app=prometheus",
)
EVERYTHING = [
    "autoscaling.enabled=true",
    "serviceMonitor.enabled=true",
    "apiKeys.existingSecret=keys",
    "args={--exit-timeout=20}",
    "image.pullSecrets[0].name=registry",
    "priorityClassName=high",
    "runtimeClassName=nvidia",
    "tolerations[0].key=nvidia.com/gpu",
    "tls.existingSecret=certificates",
    *PEERS,
]
GIB = 1 << 30


def pod(objects: dict[str, dict]) -> dict:
    workload = objects.get("Deployment") or objects["StatefulSet"]
    return workload["spec"]["template"]["spec"]


def test_helm_lints_every_target(tmp_path: Path) -> None:
    for target in TARGETS:
        write_chart(tmp_path / target.name, "canvasrt:1", target)
        result = helm("lint", "--strict", str(tmp_path / target.name))
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("target", ["cpu", "rtx-5090", "h100", "dgx-spark"])
def test_objects_are_what_kubernetes_takes(rendered: Rendered, target: str) -> None:
    assert rendered(target)
    assert pod(rendered(target, *EVERYTHING))["runtimeClassName"] == "nvidia"


@pytest.mark.parametrize("release", ["on", "1e5", "a" * 53])
def test_names_are_texts_of_a_length_that_kubernetes_takes(chart: Path, release: str) -> None:
    """Pods of a StatefulSet have a label of at most 63 characters: its name, a dash and a hash of 10 characters. Names
    that look like numbers must stay strings."""
    names = "priorityClassName=1,runtimeClassName=5,apiKeys.existingSecret=2,tls.existingSecret=3,cache.storageClass=4"
    result = helm("template", release, str(chart), "--set-string", names)
    objects = {each["kind"]: each for each in yaml.safe_load_all(result.stdout) if each}
    check_schemas(objects)
    assert len(objects["StatefulSet"]["metadata"]["name"]) + 11 <= 63


@pytest.mark.parametrize(
    ("name", "memory", "capabilities"),
    [
        ("rtx-5090", 32e9, ["12.0"]),
        ("rtx", 24e9, ["8.6", "8.9", "12.0"]),
        ("dgx-spark", None, ["12.1"]),  # DGX Spark nodes lack the memory label
    ],
)
def test_a_gpu_target_asks_for_its_gpu(
    rendered: Rendered, name: str, memory: float | None, capabilities: list[str]
) -> None:
    spec = pod(rendered(name))
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    affinity = spec["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    found = []
    for term in terms:
        wanted = {each["key"]: each["values"] for each in term["matchExpressions"]}
        assert wanted["kubernetes.io/arch"] == ["amd64" if memory else "arm64"]
        least = [str(int(0.9 * memory / 2**20))] if memory else None
        assert wanted.get("nvidia.com/gpu.memory") == least
        (major,), (minor,) = (wanted[f"nvidia.com/gpu.compute.{n}"] for n in ("major", "minor"))
        found.append(f"{major}.{minor}")
    assert found == capabilities
    assert "nvidia" not in yaml.safe_dump(pod(rendered("cpu")))


def test_the_autoscaler_goes_by_metrics_that_the_models_have(rendered: Rendered) -> None:
    objects = rendered("rtx-5090", *EVERYTHING, max_batch=8)
    metrics = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    pods = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in metrics}
    assert set(pods) == {"canvasrt_requests_waiting", "canvasrt_active_canvases"}
    assert set(pods) <= {f"canvasrt_{name}" for name in GAUGES}
    # The threshold is below a full batch; otherwise the autoscaler would never scale.
    assert pods["canvasrt_active_canvases"]["averageValue"] == "6"


def test_further_arguments_come_after_those_of_the_image(chart: Path) -> None:
    assert "args" not in pod(render(chart))["containers"][0]
    (container,) = pod(render(chart, "args={--share-passes}"))["containers"]
    words = [word for each in container["args"] for word in each.split("=")]
    assert words == [*COMMAND, "--share-passes"]


@pytest.mark.parametrize("target", ["h100", "rtx-5090"])
def test_what_is_built_or_compiled_on_a_gpu_is_kept_on_a_volume(
    rendered: Rendered, target: str
) -> None:
    objects = rendered(target)
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    (container,) = pod(objects)["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == "/opt/nim/.cache"
    assert "cache" not in {each["name"] for each in pod(objects)["volumes"]}
    (container,) = pod(rendered(target, "cache.path=/data"))["containers"]
    assert {"name": "CUDA_CACHE_PATH", "value": "/data/cuda"} in container["env"]


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


def test_nothing_gets_in_or_out_unless_it_is_opened(chart: Path, rendered: Rendered) -> None:
    policy = render(chart)["NetworkPolicy"]["spec"]
    assert policy["ingress"] == policy["egress"] == []
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    opened = rendered("rtx-5090", "networkPolicy.egress[0].ports[0].port=4318")
    assert opened["NetworkPolicy"]["spec"]["egress"] == [{"ports": [{"port": 4318}]}]
    api, metrics = ({port["port"] for port in rule["ports"]} for rule in rules(chart, *PEERS))
    assert (8000 in api, metrics) == (True, {8002})
    assert all(rule["from"] for rule in rules(chart, *PEERS))
    assert len(rules(chart, PEERS[0])) == 1
    assert "networkPolicy.from" in notes(chart)
    assert "networkPolicy.from" not in notes(chart, *PEERS)


def notes(chart: Path, *settings: str) -> str:
    """Return the notes that `helm install` would print; it needs a cluster."""
    shutil.copy(chart / "templates" / "NOTES.txt", chart / "notes.txt")
    text = 'kind: Notes\ntext: |\n  {{ tpl (.Files.Get "notes.txt") . | nindent 2 }}\n'
    (chart / "templates" / "notes-shown.yaml").write_text(text)
    return render(chart, *settings)["Notes"]["text"]


def rules(chart: Path, *settings: str) -> list[dict]:
    return render(chart, *settings)["NetworkPolicy"]["spec"]["ingress"]


def test_a_pod_answers_under_the_names_of_its_service(chart: Path) -> None:
    def hosts(*settings: str) -> list[str]:
        objects = render(chart, *settings)
        kind = "InferenceService" if "InferenceService" in objects else "StatefulSet"
        spec = objects[kind]["spec"]
        found = spec["predictor"] if kind == "InferenceService" else spec["template"]["spec"]
        variables = {each["name"]: each.get("value") for each in found["containers"][0]["env"]}
        return (variables.get("CANVASRT_ALLOWED_HOSTS") or "").split(",")

    service = render(chart)["Service"]["metadata"]["name"]
    own = {"localhost", "127.0.0.1", "$(POD_IP)", service, f"{service}.default"}
    own |= {f"{service}.default.svc", f"{service}.default.svc.cluster.local"}
    assert set(hosts()) == own
    assert set(hosts("allowedHosts={a.example,b}")) == own | {"a.example", "b"}
    assert hosts("kserve.enabled=true") == [""]


def test_probes_are_as_patient_as_the_image_s_own(chart: Path) -> None:
    (container,) = pod(render(chart))["containers"]
    for each in ("startup", "readiness", "liveness"):
        assert container[f"{each}Probe"]["timeoutSeconds"] == CHECK_TIMEOUT
    live = container["livenessProbe"]
    assert live["failureThreshold"] == FAILED_CHECKS == Health().retries
    assert live["periodSeconds"] == Health().interval
    assert Health().timeout > 2 * CHECK_TIMEOUT  # a check may call twice
    # Checks fail only after the time that it takes to replace a silent front end.
    assert (FAILED_CHECKS - 1) * Health().interval > 2 * frontend._SILENCE


def probes(container: dict) -> list[dict]:
    return [container[f"{each}Probe"]["httpGet"] for each in ("startup", "readiness", "liveness")]


def test_probes_follow_tls(chart: Path) -> None:
    (plain,) = pod(render(chart))["containers"]
    assert {each.get("scheme", "HTTP") for each in probes(plain)} == {"HTTP"}

    spec = pod(render(chart, "tls.existingSecret=certificates"))
    (container,) = spec["containers"]
    assert {each["scheme"] for each in probes(container)} == {"HTTPS"}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["NIM_SSL_MODE"] == "tls"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    for name, file in (("CERTS", "tls.crt"), ("KEY", "tls.key")):
        assert variables[f"NIM_SSL_{name}_PATH"] == f"{mounts['tls']}/{file}"
    secret = next(each["secret"] for each in spec["volumes"] if each["name"] == "tls")
    assert secret == {"secretName": "certificates", "defaultMode": 0o440}


def test_probes_of_mutual_tls_use_a_port_without_it(rendered: Rendered) -> None:
    """A kubelet has no client certificate."""
    objects = rendered("rtx-5090", "tls.existingSecret=certificates", "tls.mode=mtls")
    (container,) = pod(objects)["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert variables["NIM_SSL_CA_CERTS_PATH"].endswith("/ca.crt")
    assert variables["NIM_HEALTH_PORT"] == str(ports["health"])
    for each in probes(container):
        assert (each["port"], each.get("scheme", "HTTP")) == (ports["health"], "HTTP")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kind=DaemonSet", "kind"),
        ("replica=2", "replica"),
        ("terminationGracePeriodSeconds=49", "50"),
        ("tls.existingSecret=cert,triton.open=true", "triton.behindProxy"),
        # Settings that change ports or TLS without the probes.
        *(
            (setting, "tls.existingSecret")
            for setting in ("args={--ssl-mode=tls}", "args={--ssl-mode}")
        ),
        ("env[0].name=NIM_SSL_MODE,env[0].value=tls", "tls.existingSecret"),
        *((setting, "8000") for setting in ("args={--port=9000}", "args={--port}")),
        ("env[0].name=NIM_SERVER_PORT,env[0].value=9000", "8000"),
        ("env[0].name=NIM_HTTP_API_PORT,env[0].value=9000", "8000"),
    ],
)
def test_what_cannot_work_is_refused(chart: Path, setting: str, said: str) -> None:
    result = helm("template", "release", str(chart), "--set", setting)
    assert result.returncode != 0
    assert said in result.stderr


def test_replicas_spread_over_nodes_and_zones(chart: Path) -> None:
    spec = pod(render(chart))
    constraints = {each["topologyKey"]: each for each in spec["topologySpreadConstraints"]}
    assert set(constraints) == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    labels = render(chart)["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    for each in constraints.values():
        assert each["labelSelector"]["matchLabels"].items() <= labels.items()
        # Not `DoNotSchedule`, since several replicas may have to share a node with several GPUs.
        assert each["whenUnsatisfiable"] == "ScheduleAnyway"
    assert "topologySpreadConstraints" not in pod(render(chart, "spread.enabled=false"))


@pytest.mark.parametrize("name", ["cpu", "rtx-5090", "h100"])
def test_no_folder_of_a_pod_is_without_a_limit(rendered: Rendered, name: str) -> None:
    spec = pod(rendered(name))
    empty = [each["emptyDir"] for each in spec["volumes"] if "emptyDir" in each]
    assert len(empty) >= 2
    assert all(each.get("sizeLimit") for each in empty)
    (container,) = spec["containers"]
    for kind in ("requests", "limits"):
        assert {"memory", "ephemeral-storage"} <= container["resources"][kind].keys()
    assert container["resources"]["requests"]["cpu"]


def test_resources_follow_target_and_model(rendered: Rendered) -> None:
    sizes = ReplicaSizes(
        memory=21 * GIB,
        cpu=4,
        shared=GIB,
        temporary=GIB // 4,
        cache=50 * GIB,
        startup=1234,
        further=100,
        contexts=2 * GIB - 1,
    )
    for name, stored in (("h100", "2Gi"), ("cpu", "52Gi")):
        objects = rendered(name, sizes=sizes)
        (container,) = pod(objects)["containers"]
        resources = container["resources"]
        assert resources["requests"] == {"cpu": 4, "memory": "22Gi", "ephemeral-storage": stored}
        assert resources["limits"]["memory"] == "33Gi"
        assert resources["limits"]["ephemeral-storage"] == stored
        assert container["startupProbe"]["failureThreshold"] == -(-1234 // 5)
        volumes = {each["name"]: each.get("emptyDir") for each in pod(objects)["volumes"]}
        assert volumes["tmp"]["sizeLimit"] == "256Mi"
        assert volumes["shm"]["sizeLimit"] == "1Gi"
    assert objects["Deployment"]["spec"]["progressDeadlineSeconds"] == 1234 + 60
    objects = rendered("h100", "gpus=3", sizes=sizes)
    (several,) = pod(objects)["containers"]
    assert several["startupProbe"]["failureThreshold"] == -(-(1234 + 2 * 100) // 5)
    memory = [several["resources"][kind]["memory"] for kind in ("requests", "limits")]
    assert (memory, several["resources"]["requests"]["cpu"]) == (["26Gi", "37Gi"], 4)
    assert several["args"][:: len(several["args"]) - 1] == ["serve", "--devices=all"]
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"
    for own in ("99G", "33.5Gi"):  # the user's limit is not multiplied
        objects = rendered("h100", "gpus=3", f"resources.limits.memory={own}", sizes=sizes)
        assert pod(objects)["containers"][0]["resources"]["limits"]["memory"] == own


def test_a_pod_gets_longer_to_stop_than_its_server_takes(chart: Path) -> None:
    spec = pod(render(chart, "terminationGracePeriodSeconds=50"))  # the schema's minimum
    waits = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert spec["terminationGracePeriodSeconds"] >= waits + STOP_GRACE


def test_keys_come_from_a_secret_that_exists(chart: Path) -> None:
    volumes = pod(render(chart, "apiKeys.existingSecret=keys"))["volumes"]
    assert {"name": "api-keys", "secret": {"secretName": "keys", "defaultMode": 0o440}} in volumes


@pytest.mark.parametrize("opened", [False, True])
def test_tritons_ports_are_opened_on_purpose_only(chart: Path, opened: bool) -> None:
    objects = render(chart, *PEERS, *(["triton.open=true"] if opened else []))
    wanted = {8000, 8002} | ({8001, 8080} if opened else set())
    policy = objects["NetworkPolicy"]["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == wanted
    assert {port["port"] for port in objects["Service"]["spec"]["ports"]} == wanted
    (container,) = pod(objects)["containers"]
    assert {port["containerPort"] for port in container["ports"]} == wanted
    assert ("--triton-host=0.0.0.0" in container.get("args", [])) == opened


def test_a_proxy_in_front_of_tritons_ports_may_have_the_tls(chart: Path) -> None:
    settings = ("tls.existingSecret=cert", "triton.open=true", "triton.behindProxy=true")
    spec = pod(render(chart, *settings))
    assert "--triton-behind-proxy" in spec["containers"][0]["args"]


def test_kserve_takes_the_place_of_the_deployment(chart: Path) -> None:
    everything = [each for each in EVERYTHING if not each.startswith("tls.")]
    objects = render(chart, "kserve.enabled=true", *everything)
    assert set(objects) == {"InferenceService", "NetworkPolicy"}
    predictor = objects["InferenceService"]["spec"]["predictor"]
    assert predictor["containers"][0]["image"] == "registry.example:5000/team/canvasrt:1"
    # Without Knative, KServe scales only by CPU or memory.
    assert (predictor["scaleMetric"], predictor["scaleTarget"]) == ("cpu", 80)
    # By default, KServe first starts the new replica, which would wait forever for the old replica's GPU.
    strategy = predictor["deploymentStrategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert "svc/release-predictor 8000:80" in notes(chart, "kserve.enabled=true")


def test_openshift_chooses_the_user(chart: Path) -> None:
    """OpenShift's default constraint, restricted-v2, refuses pods that name a user or group."""

    def context(*more: str) -> dict[str, Any]:
        result = helm("template", "release", str(chart), *more)
        objects = {each["kind"]: each for each in yaml.safe_load_all(result.stdout) if each}
        return pod(objects)["securityContext"]

    chosen = context("--api-versions", "security.openshift.io/v1")
    assert chosen == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert set(context()) - set(chosen) == {"runAsUser", "runAsGroup", "fsGroup"}
