"""The Helm chart, by helm's own lint and template and by the Kubernetes API's schemas."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from canvasrt.containers.names import CHECK_TIMEOUT, FAILED_CHECKS
from canvasrt.containers.package.chart import write_chart
from canvasrt.containers.package.image_settings import Health
from canvasrt.containers.package.sizes import ReplicaSizes
from canvasrt.containers.serve import frontend
from canvasrt.targets import TARGETS, find_target
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
def test_objects_are_what_kubernetes_takes(tmp_path: Path, target: str) -> None:
    write_chart(tmp_path / "chart", "canvasrt:1", find_target(target))
    check_schemas(render(tmp_path / "chart"))
    objects = render(tmp_path / "chart", *EVERYTHING)
    check_schemas(objects)
    assert pod(objects)["runtimeClassName"] == "nvidia"


@pytest.mark.parametrize("release", ["on", "1e5", "a" * 53])
def test_names_are_texts_of_a_length_that_kubernetes_takes(chart: Path, release: str) -> None:
    """A StatefulSet's pods have a label of its name, a dash and a hash of 10 characters."""
    names = "priorityClassName=1,runtimeClassName=5,apiKeys.existingSecret=2,tls.existingSecret=3,cache.storageClass=4"
    result = helm("template", release, str(chart), "--set-string", names)
    objects = {each["kind"]: each for each in yaml.safe_load_all(result.stdout) if each}
    check_schemas(objects)
    assert len(objects["StatefulSet"]["metadata"]["name"]) + 11 <= 63


@pytest.mark.parametrize(
    ("name", "memory", "capabilities"),
    [("rtx-5090", 32e9, ["12.0"]), ("rtx", 24e9, ["8.6", "8.9", "12.0"])],
)
def test_a_gpu_target_asks_for_its_gpu(
    tmp_path: Path, name: str, memory: float, capabilities: list[str]
) -> None:
    write_chart(tmp_path / "chart", "canvasrt:1", find_target(name))
    objects = render(tmp_path / "chart")
    check_schemas(objects)
    assert pod(objects)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    affinity = pod(objects)["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    found = []
    for term in terms:
        wanted = {each["key"]: each["values"] for each in term["matchExpressions"]}
        assert wanted["kubernetes.io/arch"] == ["amd64"]
        assert wanted["nvidia.com/gpu.memory"] == [str(int(0.9 * memory / 2**20))]
        (major,), (minor,) = (wanted[f"nvidia.com/gpu.compute.{n}"] for n in ("major", "minor"))
        found.append(f"{major}.{minor}")
    assert found == capabilities


def test_unified_memory_is_not_asked_for(tmp_path: Path) -> None:
    """NVIDIA's GPU feature discovery gives such nodes no label `nvidia.com/gpu.memory`."""
    write_chart(tmp_path / "chart", "canvasrt:1", find_target("dgx-spark"))
    assert "gpu.memory" not in yaml.safe_dump(pod(render(tmp_path / "chart")))


def test_the_autoscaler_goes_by_metrics_that_the_models_have(tmp_path: Path) -> None:
    from canvasrt.containers.triton.metrics import GAUGES

    write_chart(tmp_path / "chart", "canvasrt:1", find_target("rtx-5090"), max_batch=8)
    metrics = render(tmp_path / "chart", *EVERYTHING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    pods = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in metrics}
    assert set(pods) == {"canvasrt_requests_waiting", "canvasrt_active_canvases"}
    assert set(pods) <= {f"canvasrt_{name}" for name in GAUGES}
    # The threshold lies below a full batch. Otherwise it would never scale.
    assert pods["canvasrt_active_canvases"]["averageValue"] == "6"


def test_further_arguments_come_after_those_of_the_image(chart: Path) -> None:
    from canvasrt.containers.package.image_settings import COMMAND

    assert "args" not in pod(render(chart))["containers"][0]
    (container,) = pod(render(chart, "args={--share-passes}"))["containers"]
    words = [word for each in container["args"] for word in each.split("=")]
    assert words == [*COMMAND, "--share-passes"]


def test_a_cpu_target_asks_for_none(tmp_path: Path) -> None:
    write_chart(tmp_path / "chart", "canvasrt:1", find_target("cpu"))
    text = yaml.safe_dump(pod(render(tmp_path / "chart")))
    assert "nvidia" not in text


@pytest.mark.parametrize("target", ["h100", "rtx-5090"])
def test_what_is_built_or_compiled_on_a_gpu_is_kept_on_a_volume(
    target: str, tmp_path: Path
) -> None:
    write_chart(tmp_path / "chart", "canvasrt:1", find_target(target))
    objects = render(tmp_path / "chart")
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    mounts = {
        each["name"]: each["mountPath"] for each in pod(objects)["containers"][0]["volumeMounts"]
    }
    assert mounts[claim["metadata"]["name"]] == "/opt/nim/.cache"
    assert "cache" not in {each["name"] for each in pod(objects)["volumes"]}
    (container,) = pod(render(tmp_path / "chart", "cache.path=/data"))["containers"]
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


def test_nothing_gets_out_unless_it_is_opened(chart: Path) -> None:
    opened = render(chart, "networkPolicy.egress[0].ports[0].port=4318")
    check_schemas(opened)
    assert opened["NetworkPolicy"]["spec"]["egress"] == [{"ports": [{"port": 4318}]}]


def test_nothing_gets_in_unless_a_peer_is_named(chart: Path) -> None:
    policy = render(chart)["NetworkPolicy"]["spec"]
    assert policy["ingress"] == policy["egress"] == []
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    api, metrics = ({port["port"] for port in rule["ports"]} for rule in rules(chart, *PEERS))
    assert (8000 in api, metrics) == (True, {8002})
    assert all(rule["from"] for rule in rules(chart, *PEERS))
    assert len(rules(chart, PEERS[0])) == 1
    assert "networkPolicy.from" in notes(chart)
    assert "networkPolicy.from" not in notes(chart, *PEERS)


def notes(chart: Path, *settings: str) -> str:
    """What `helm install` would say, which needs a cluster."""
    shutil.copy(chart / "templates" / "NOTES.txt", chart / "notes.txt")
    text = 'kind: Notes\ntext: |\n  {{ tpl (.Files.Get "notes.txt") . | nindent 2 }}\n'
    (chart / "templates" / "notes-shown.yaml").write_text(text)
    return render(chart, *settings)["Notes"]["text"]


def rules(chart: Path, *settings: str) -> list[dict]:
    return render(chart, *settings)["NetworkPolicy"]["spec"]["ingress"]


def probes(container: dict) -> list[dict]:
    return [each["httpGet"] for each in probes_of(container)]


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
    assert [each["timeoutSeconds"] for each in probes_of(container)] == [CHECK_TIMEOUT] * 3
    live = container["livenessProbe"]
    assert live["failureThreshold"] == FAILED_CHECKS == Health().retries
    assert live["periodSeconds"] == Health().interval
    assert Health().timeout > 2 * CHECK_TIMEOUT  # it may call twice
    # Some seconds pass before a silent front end is replaced, and some more until the new one
    # answers.
    assert (FAILED_CHECKS - 1) * Health().interval > 2 * frontend._SILENCE


def probes_of(container: dict) -> list[dict]:
    return [container[f"{each}Probe"] for each in ("startup", "readiness", "liveness")]


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


def test_probes_of_mutual_tls_use_a_port_without_it(chart: Path) -> None:
    """A kubelet has no client certificate to show."""
    settings = ("tls.existingSecret=certificates", "tls.mode=mtls")
    (container,) = pod(render(chart, *settings))["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert variables["NIM_SSL_CA_CERTS_PATH"].endswith("/ca.crt")
    assert variables["NIM_HEALTH_PORT"] == str(ports["health"])
    assert {(each["port"], each.get("scheme", "HTTP")) for each in probes(container)} == {
        (ports["health"], "HTTP")
    }
    assert check_schemas(render(chart, *settings)) is None


@pytest.mark.parametrize(
    "setting",
    [
        *(
            "env[0].name=NIM_SSL_MODE,env[0].value=tls",
            "args={--ssl-mode=tls}",
            "args={--ssl-mode}",
        ),
        *(
            "env[0].name=NIM_SERVER_PORT,env[0].value=9000",
            "env[0].name=NIM_HTTP_API_PORT,env[0].value=9000",
            "args={--port=9000}",
            "args={--port}",
        ),
    ],
)
def test_what_probes_would_not_follow_is_refused(chart: Path, setting: str) -> None:
    result = helm("template", "release", str(chart), "--set", setting)
    assert result.returncode != 0
    assert ("tls.existingSecret" if "ssl" in setting.lower() else "8000") in result.stderr


def test_replicas_spread_over_nodes_and_zones(chart: Path) -> None:
    spec = pod(render(chart))
    constraints = {each["topologyKey"]: each for each in spec["topologySpreadConstraints"]}
    assert set(constraints) == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    labels = render(chart)["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    for each in constraints.values():
        assert each["labelSelector"]["matchLabels"].items() <= labels.items()
        # The only node may have several GPUs.
        assert each["whenUnsatisfiable"] == "ScheduleAnyway"
    assert "topologySpreadConstraints" not in pod(render(chart, "spread.enabled=false"))


def test_no_folder_of_a_pod_is_without_a_limit(tmp_path: Path) -> None:
    for name in ("cpu", "rtx-5090", "h100"):
        write_chart(tmp_path / name, "canvasrt:1", find_target(name))
        spec = pod(render(tmp_path / name))
        empty = [each["emptyDir"] for each in spec["volumes"] if "emptyDir" in each]
        assert len(empty) >= 2
        assert all(each.get("sizeLimit") for each in empty)
        (container,) = spec["containers"]
        for kind in ("requests", "limits"):
            assert {"memory", "ephemeral-storage"} <= container["resources"][kind].keys()
        assert container["resources"]["requests"]["cpu"]


def test_resources_follow_target_and_model(tmp_path: Path) -> None:
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
    write_chart(tmp_path / "h100", "canvasrt:1", find_target("h100"), sizes=sizes)
    write_chart(tmp_path / "cpu", "canvasrt:1", find_target("cpu"), sizes=sizes)
    for name, stored in (("h100", "2Gi"), ("cpu", "52Gi")):
        objects = render(tmp_path / name)
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
    (several,) = pod(render(tmp_path / "h100", "gpus=3"))["containers"]
    assert several["startupProbe"]["failureThreshold"] == -(-(1234 + 2 * 100) // 5)
    memory = [several["resources"][kind]["memory"] for kind in ("requests", "limits")]
    assert memory == ["26Gi", "37Gi"]
    assert several["resources"]["requests"]["cpu"] == 4
    for own in ("99G", "33.5Gi"):  # no sum in another unit, or of a fraction
        setting = f"resources.limits.memory={own}"
        (several,) = pod(render(tmp_path / "h100", "gpus=3", setting))["containers"]
        assert several["resources"]["limits"]["memory"] == own
    assert several["args"][:: len(several["args"]) - 1] == ["serve", "--devices=all"]
    (claim,) = render(tmp_path / "h100")["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"


def test_a_pod_gets_longer_to_stop_than_its_server_takes(chart: Path) -> None:
    from canvasrt.containers.package.image_settings import STOP_GRACE

    spec = pod(render(chart, "terminationGracePeriodSeconds=50"))  # the least that the schema takes
    waits = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert spec["terminationGracePeriodSeconds"] >= waits + STOP_GRACE


def test_keys_come_from_a_secret_that_exists(chart: Path) -> None:
    spec = pod(render(chart, "apiKeys.existingSecret=keys"))
    assert {"name": "api-keys", "secret": {"secretName": "keys", "defaultMode": 0o440}} in spec[
        "volumes"
    ]


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


def test_tls_is_not_got_around(chart: Path) -> None:
    guard = "tls.existingSecret=cert"
    command = ["template", "release", str(chart), "--set", guard, "--set", "triton.open=true"]
    refused = helm(*command)
    assert refused.returncode != 0
    assert "triton.behindProxy" in refused.stderr
    spec = pod(render(chart, guard, "triton.open=true", "triton.behindProxy=true"))
    assert "--triton-behind-proxy" in spec["containers"][0]["args"]


def test_kserve_takes_the_place_of_the_deployment(chart: Path) -> None:
    everything = [each for each in EVERYTHING if not each.startswith("tls.")]
    objects = render(chart, "kserve.enabled=true", *everything)
    assert set(objects) == {"InferenceService", "NetworkPolicy"}
    predictor = objects["InferenceService"]["spec"]["predictor"]
    assert predictor["containers"][0]["image"] == "registry.example:5000/team/canvasrt:1"
    # Without Knative, KServe takes no other metric but memory.
    assert (predictor["scaleMetric"], predictor["scaleTarget"]) == ("cpu", 80)
    assert "svc/release-predictor 8000:80" in notes(chart, "kserve.enabled=true")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kind=DaemonSet", "kind"),
        ("replica=2", "replica"),
        ("terminationGracePeriodSeconds=49", "50"),
    ],
)
def test_a_wrong_value_is_refused(chart: Path, setting: str, said: str) -> None:
    result = helm("template", "release", str(chart), "--set", setting)
    assert result.returncode != 0
    assert said in result.stderr
