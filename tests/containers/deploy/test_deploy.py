"""`canvasrt deploy`: the command that it runs, and what it refuses before running it."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import socket
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from canvasrt.cli.app import parsed_command
from canvasrt.cli.app import run as run_command_line
from canvasrt.containers.deploy import deploy as deploying
from canvasrt.containers.deploy.command import run_command
from canvasrt.containers.deploy.container_engine import ContainerEngine, find_engine
from canvasrt.containers.deploy.options import DeployOptions
from canvasrt.containers.deploy.packages import Package, load, open_package
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.package import package
from canvasrt.containers.ports import bind
from canvasrt.errors import CanvasError, UsageError
from tests.conftest import Command
from tests.helpers import container_tools, serving

DOCKER, PODMAN = ContainerEngine("docker"), ContainerEngine("podman")
CPU = Package("canvasrt:latest", None, "image", {"canvasrt.target": "cpu"}, "amd64")
GPU = Package("canvasrt:latest", None, "image", {"canvasrt.target": "rtx-5090"}, "amd64")


def words(package: Package, engine: ContainerEngine = DOCKER, **options: object) -> str:
    return shlex.join(run_command(package, DeployOptions(**options), engine))  # type: ignore[arg-type]


def test_the_container_is_hardened():
    said = words(CPU)
    for option in (
        "--read-only",
        "--tmpfs /tmp:size=268435456",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--pids-limit 4096",
        "--shm-size 1g",
        "--stop-timeout 45",
        "--log-opt max-size=32m",
        "--publish 127.0.0.1:8000:8000",
        "--volume canvasrt-cache:/opt/nim/.cache",
    ):
        assert option in said
    assert "gpu" not in said
    assert "privileged " not in said


def test_a_dead_server_is_ended_and_its_container_restarted():
    assert "--restart unless-stopped --init --env CANVASRT_END_UNHEALTHY=1" in words(CPU)
    assert "--restart unless-stopped --env CANVASRT_END_UNHEALTHY=1" in words(CPU, PODMAN)


def test_without_keys_it_answers_under_names_that_users_expect():
    def hosts(**options: object) -> str:
        found = [each for each in words(CPU, **options).split() if "ALLOWED_HOSTS" in each]
        return found[0].partition("=")[2] if found else ""

    assert hosts(name="mine") == "127.0.0.1,::1,localhost,mine"
    given = {"CANVASRT_ALLOWED_HOSTS": "a.example,b"}
    assert hosts(server=given) == "a.example,b"
    assert hosts(listen="0.0.0.0") == ""  # accepts any host name, as `serve` does
    assert hosts(listen="0.0.0.0", server=given) == "a.example,b"
    assert "ALLOWED_HOSTS" not in words(CPU, server={"CANVASRT_ALLOWED_HOSTS": ""})
    (shown,) = (each for each in parsed_command("deploy").params if each.name == "hosts")
    assert shown.show_default == "127.0.0.1,::1,localhost,NAME, on loopback"
    # The user's options come later, so they take precedence.
    said = words(CPU, variables=("CANVASRT_ALLOWED_HOSTS=mine",))
    assert said.index("ALLOWED_HOSTS=127") < said.index("ALLOWED_HOSTS=mine")


def test_a_file_of_variables_takes_precedence_over_defaults(tmp_path: Path):
    """If a file is given, no default is passed by --env: docker would prefer it to the file."""
    (file := tmp_path / "env").write_text("CANVASRT_ALLOWED_HOSTS=api.example\n")
    assert "ALLOWED_HOSTS=" not in words(CPU, variables_file=file)
    given = {"CANVASRT_ALLOWED_HOSTS": "a.example"}
    assert "ALLOWED_HOSTS=a.example" in words(CPU, variables_file=file, server=given)


def test_gpus_are_given_to_gpu_targets_alone():
    assert "--gpus all" in words(GPU)
    assert "--gpus '\"device=0,2\"'" in words(GPU, gpus="0,2")
    assert "--device=nvidia.com/gpu=all" in words(GPU, PODMAN)
    assert "--device=nvidia.com/gpu=0 --device=nvidia.com/gpu=2" in words(GPU, PODMAN, gpus="0,2")
    assert "label=disable" in words(GPU, PODMAN)
    assert "label=disable" not in words(CPU, PODMAN) + words(GPU)


def test_folders_are_labelled_for_the_container_where_podman_has_selinux(tmp_path: Path):
    said = words(CPU, PODMAN, engines=tmp_path)
    assert "/opt/nim/.cache:rw,z" in said
    assert "/engines:ro,z" in said


def test_limits_ports_and_variables_are_passed_on(tmp_path: Path):
    (keys := tmp_path / "keys").write_text("CANVASRT_API_KEYS=a\n")
    said = words(
        CPU,
        listen="0.0.0.0",
        port=9000,
        grpc_port=None,
        memory="8g",
        cpus=1.5,
        variables=("NIM_SERVED_MODEL_NAME=mine", "HF_TOKEN"),
        variables_file=keys,
    )
    assert "--memory 8g --cpus 1.5" in said
    assert "--publish 0.0.0.0:9000:8000" in said
    assert ":8001" not in said
    assert "--env NIM_SERVED_MODEL_NAME=mine --env HF_TOKEN" in said
    assert f"--env-file {keys}" in said


def test_on_the_hosts_network_it_uses_the_ports_that_were_asked_for():
    said = words(CPU, network="host", port=9000, grpc_port=9001)
    assert "--env NIM_SERVER_PORT=9000" in said
    assert said.endswith("--grpc-port 9001 --http-port 8080 --metrics-port 0")
    assert "--publish" not in said
    assert "--host 127.0.0.1 --grpc-port" in said
    assert "ALLOWED_HOSTS=127.0.0.1" in said
    # On the host's network, too, a container is reachable from other machines only if asked for.
    assert words(CPU, network="host").endswith("--exit-timeout 30 --host 127.0.0.1")
    said = words(CPU, network="host", listen="0.0.0.0")
    assert said.endswith("--host 0.0.0.0")
    assert "ALLOWED_HOSTS" not in said
    with pytest.raises(UsageError, match="the health check calls"):
        words(CPU, network="host", listen="192.0.2.1")


def test_addresses_are_written_as_container_engines_take_them():
    assert "--publish 127.0.0.1:8000:8000" in words(CPU, listen="localhost")
    said = words(CPU, listen="::1", grpc_port=9001)
    assert r"--publish '[::1]:8000:8000' --publish '[::1]:9001:8001'" in said
    found = deploying.addresses(DeployOptions(listen="::1", grpc_port=9001))
    assert found == {"openai": "http://[::1]:8000/v1", "grpc": "[::1]:9001"}
    assert deploying.addresses(DeployOptions(listen="::"))["openai"] == "http://[::1]:8000/v1"


def test_tritons_ports_are_published_on_purpose_only():
    assert "8001" not in words(CPU)
    said = words(CPU, grpc_port=9001)
    assert "--publish 127.0.0.1:9001:8001" in said
    assert said.endswith("--exit-timeout 30 --triton-host 0.0.0.0")


@pytest.mark.parametrize("ci", ["true", "1", ""])
def test_ci_skips_nothing_that_it_must_run(ci: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert serving.is_skipped() == (not ci)
    with pytest.raises(
        pytest.fail.Exception if ci else pytest.skip.Exception, match="there is no docker"
    ):
        container_tools.missing("there is no docker")


def test_a_cache_folder_must_be_there_and_writable(tmp_path: Path):
    with pytest.raises(CanvasError, match="cache folder") as refused:
        words(CPU, cache=str(tmp_path / "none"))
    assert "mkdir" in refused.value.hint
    (folder := tmp_path / "root").mkdir(mode=0o700)
    if os.geteuid() == 0:
        with pytest.raises(CanvasError, match="user 1000, which cannot write"):
            words(CPU, cache=str(folder))
    folder.chmod(0o777 | stat.S_ISVTX)
    assert f"--volume {folder}:/opt/nim/.cache" in words(CPU, cache=str(folder))


def test_an_image_of_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ContainerEngine, "architecture", "arm64")
    with pytest.raises(CanvasError, match="is for amd64, but this machine is arm64"):
        deploying.check_architecture(GPU, DOCKER)


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({"Config": {"Healthcheck": {"StartPeriod": 5000 * 10**9}}}, 5000),
        ({"HealthCheck": {"StartPeriod": 5000 * 10**9}}, 5000),  # podman's spelling
        ({"Config": {"Healthcheck": {"StartPeriod": 10**9}}}, 3600),
        ({"Config": {}}, 3600),
        (None, 3600),
    ],
)
def test_a_start_may_take_as_long_as_the_image_allows(
    known: dict | None, wanted: float, monkeypatch: pytest.MonkeyPatch
):
    """Building bf16 engines for an H100 may take more than an hour."""
    monkeypatch.setattr(ContainerEngine, "inspect", lambda *_: known)
    assert deploying.start_limit(DOCKER, "canvasrt:1") == wanted


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CanvasError, match=f"port {port} on 127.0.0.1 is in use") as refused:
            deploying.check_ports(DeployOptions(port=port))
    assert "--port" in refused.value.hint
    with pytest.raises(UsageError, match=f"--port and --grpc-port are both {port}"):
        deploying.check_ports(DeployOptions(port=port, grpc_port=port))
    with pytest.raises(UsageError, match="--port and --http-port are both 8080"):
        deploying.check_ports(DeployOptions(port=8080, network="host"))


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        # Messages of docker 20.10 and 28 and of podman 4.3.
        (
            'docker: Error response from daemon: could not select device driver "" with'
            " capabilities: [[gpu]].",
            "cannot give GPUs",
        ),
        ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all", "GPUs"),
        (
            "Error response from daemon: driver failed programming external connectivity: Bind for"
            " 0.0.0.0:8000 failed: port is already allocated.",
            "a port is in use",
        ),
        (
            'Conflict. The container name "/canvasrt" is already in use by container "1f".',
            "of that name already",
        ),
        ("exec /opt/canvasrt/venv/bin/python3: exec format error", "another architecture"),
        ("something else", "cannot start the container: something else"),
    ],
)
def test_what_an_engine_says_is_explained(said: str, meaning: str):
    assert meaning in deploying.refusal(DOCKER, "canvasrt", said).message


def test_hints_name_commands_that_work_when_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hint = deploying.refusal(PODMAN, "one", "the name is already in use").hint
    assert "podman rm -f one" in hint
    folder = tmp_path / "a b" / "c"
    with pytest.raises(CanvasError, match="cache folder") as refused:
        words(CPU, cache=str(folder))
    assert f"run mkdir -p '{folder}' && chown 1000 '{folder}'" in refused.value.hint

    def fail(_: ContainerEngine, *words: str, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "", "no space left")

    monkeypatch.setattr(ContainerEngine, "run", fail)
    with pytest.raises(CanvasError, match=r"docker cannot build .*: no space left") as failed:
        load(Package("mine:2", folder, "context", {}, None), DOCKER)
    assert failed.value.hint == f"run it yourself: docker build --tag mine:2 '{folder}'"
    with pytest.raises(CanvasError, match="docker info failed") as failed:
        _ = DOCKER.architecture
    assert failed.value.hint == "run it yourself: docker info --format '{{.Architecture}}'"


def test_without_docker_and_podman_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CanvasError, match="docker is not installed; podman is not installed"):
        find_engine()
    (tmp_path / "docker").write_text(
        "#!/bin/sh\necho 'Cannot connect to the Docker daemon. Is it running?' >&2\nexit 1\n"
    )
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(CanvasError, match=r"docker does not answer .Cannot connect"):
        find_engine("docker")


def test_a_package_says_what_it_is(packaged: Bundle, engines: Bundle, tmp_path: Path):
    found = open_package(str(packaged.path), None)
    assert (found.kind, found.tag, found.needs_gpu) == ("context", "canvasrt:latest", False)
    assert found.engines is None
    options = PackageOptions(engines="mount", tag="mine:2")
    mounted = package(engines.path, tmp_path / "mounted", options=options)
    found = open_package(str(mounted.path), None)
    assert found.tag == "mine:2"
    folder = mounted.path / "engines"
    assert f"--volume {folder}:/opt/canvasrt/package/engines:ro" in words(found)


@pytest.mark.parametrize(
    ("engine", "store"), [("docker", "docker-daemon"), ("podman", "containers-storage")]
)
def test_print_copies_a_layout_to_the_engine_that_runs_it(
    engine: str, store: str, monkeypatch: pytest.MonkeyPatch
):
    layout = Package("canvasrt:1", Path("image"), "oci", {}, "amd64")
    monkeypatch.setattr(deploying, "open_package", lambda *_: layout)
    copy, run = deploying.commands_of("image", DeployOptions(), engine)
    assert copy == f"skopeo copy oci:image {store}:canvasrt:1"
    assert run.startswith(f"{engine} run ")


@pytest.mark.parametrize("updates", [True, False])
def test_a_container_that_is_not_restarted_is_said_to_be(
    updates: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """podman before 5.1 cannot set a restart policy of an existing container, so the output says that there is none."""

    def run(_: ContainerEngine, *words: str, **__: object) -> subprocess.CompletedProcess[str]:
        failed = words[0] == "update" and not updates
        return subprocess.CompletedProcess(words, int(failed), "{}", "")

    monkeypatch.setattr(ContainerEngine, "run", run)
    monkeypatch.setattr(deploying, "find_engine", lambda _: PODMAN)
    monkeypatch.setattr(deploying, "open_package", lambda *_: replace(CPU, architecture=None))
    monkeypatch.setattr(deploying, "start_limit", lambda *_: 1.0)
    with bind("127.0.0.1", 0, "--port") as held:  # so that nobody else takes it
        port = str(held.getsockname()[1])
        assert run_command_line(["deploy", "one", "--port", port]) == 0
    assert ("does not restart the container" in capsys.readouterr().out) != updates


def test_an_interrupted_start_leaves_no_container(monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[str, ...]] = []

    def run(_: ContainerEngine, *words: str, **__: object) -> subprocess.CompletedProcess[str]:
        ran.append(words)
        if words[0] == "exec":
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(words, 0, "{}", "")

    monkeypatch.setattr(ContainerEngine, "run", run)
    with pytest.raises(KeyboardInterrupt):
        deploying.wait_ready(DOCKER, "one", 1.0)
    assert ran[-1] == ("rm", "--force", "one")


def test_print_shows_the_commands(packaged: Bundle, command: Command):
    done = command("deploy", packaged.path, "--print", "--name", "one", "--json")
    assert done.returncode == 0, done.stderr
    build, run = json.loads(done.stdout)["commands"]
    assert build == f"docker build --tag canvasrt:latest {packaged.path}"
    assert run.startswith("docker run --detach --name one --restart unless-stopped ")
    assert run.endswith(" canvasrt:latest")
    named = ("--print", "--name", "one")
    plain = command("deploy", packaged.path, *named, "--allowed-hosts", "a.example")
    hosts = "--env CANVASRT_ALLOWED_HOSTS="
    assert f"{hosts}127.0.0.1,::1,localhost,one " in run
    run = run.replace(f"{hosts}127.0.0.1,::1,localhost,one ", f"{hosts}a.example ")
    assert plain.stdout.splitlines() == [build, run]
