"""A package's image on a substitute for NVIDIA's base image, run by real docker and real podman."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.standin import STANDIN_TAG as BASE
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.containers.deploy.container_engine import ContainerEngine
from canvasrt.containers.image.base import read_base
from canvasrt.containers.image.build import WrittenImage, write_image
from canvasrt.containers.image.oci_layout import write_archive
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.package import package
from canvasrt.containers.package.sizes import _COMPILE_SECONDS, sizes_of
from canvasrt.containers.ports import Ports
from canvasrt.targets import find_target
from tests.conftest import Command
from tests.helpers import container_tools as tools
from tests.helpers.rehearsal import kernels_in, rehearsal
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.standin_image import (
    KEY,
    SECRET,
    STANDIN_TAG,
    THREE_PROTOCOLS,
    _kept,
    base,
    docker,
    healthy,
    made,
)

__all__ = ["_kept", "base", "docker", "made"]

pytestmark = [needs_triton, pytest.mark.acceptance]
CACHE, PER_SHAPE = "/opt/nim/.cache", 20 << 20
# Patterns of private keys, of keys of common services, and of the two secrets that are set while the image is built.
_SECRETS = re.compile(
    rb"-----BEGIN (?:RSA |EC |OPENSSH )?PRIVATE KEY-----\n[A-Za-z0-9+/]{40}|\bAKIA[0-9A-Z]{16}\b"
    rb"|\bhf_[A-Za-z0-9]{30,}\b|\bghp_[A-Za-z0-9]{36}\b|\bnvapi-[A-Za-z0-9_-]{40,}"
)
_BEGINNINGS = (b" PRIVATE KEY-----\n", b"AKIA", b"hf_", b"ghp_", b"nvapi-")
# Stops all processes of a container except the first and itself, and kills the front end, so that health checks fail at
# once.
_STOP_ALL = """
import os, signal
from pathlib import Path
for folder in Path("/proc").glob("[0-9]*"):
    if int(folder.name) not in (1, os.getpid()):
        os.kill(int(folder.name), signal.SIGSTOP)
        if b"canvasrt.containers.openai" in (folder / "cmdline").read_bytes():
            os.kill(int(folder.name), signal.SIGKILL)
"""
_FIND = (*tools.HARDENED, "--entrypoint", "find")
_OWNERS = ("/opt/canvasrt/package", "/opt/nim", "-printf", r"%u:%g %m %p\n")
_LOAD = """
import json, threading, time, urllib.request, openai
client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0)
answers, errors = [], []
def ask(number):
    try:
        reply = client.chat.completions.create(
            model=MODEL, seed=number, max_tokens=64, messages=[{"role": "user", "content": "x"}],
            extra_body={"max_denoising_steps": 100})
        answers.append(reply.choices[0].finish_reason)
    except Exception as error:
        errors.append(repr(error))
MODEL = client.models.list().data[0].id
threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
[thread.start() for thread in threads]
while b"requests_in_flight 4" not in urllib.request.urlopen("http://127.0.0.1:8000/v1/metrics").read():
    assert not answers + errors, (answers, errors)
    time.sleep(0.05)
print("asked", flush=True)
[thread.join() for thread in threads]
print(json.dumps({"answers": answers, "errors": errors}))
"""


@pytest.fixture(scope="module")
def running(docker: ContainerEngine) -> Iterator[str]:
    """A healthy container, hardened and without a network."""
    with tools.container(docker, STANDIN_TAG, *tools.HARDENED) as name:
        healthy(docker, name)
        yield name


def test_what_is_added_to_the_base_is_small(made: WrittenImage):
    assert made.other_bytes < 10**9
    assert made.engine_bytes > 10**6


def test_another_run_gives_the_same_image(
    made: WrittenImage, base: Path, engines: Bundle, tmp_path: Path
):
    again = write_image(
        engines.path,
        tmp_path / "layout",
        format="oci",
        base=base,
        options=PackageOptions(tag=STANDIN_TAG),
    )
    assert again.image.digest == made.image.digest


def test_no_layer_holds_a_secret_or_what_only_building_needs(made: WrittenImage):
    image = read_base(made.image.path)
    text = json.dumps(image.config).encode()
    assert not _SECRETS.search(text)
    for planted in (SECRET, KEY):
        assert _SECRETS.search(planted.encode())  # the patterns find planted secrets
        assert any(each in planted.encode() for each in _BEGINNINGS)
    seen = 0
    for layer in image.layers[-len(made.image.layers) :]:
        with made.image.path.open("rb") as file:
            file.seek(layer.offset)
            mode = "r|gz" if layer.media_type.endswith("gzip") else "r|"
            with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
                for member in archive:
                    assert not re.search(
                        r"site-packages/(torch|transformers|pip|onnx|modelopt)/", member.name
                    )
                    assert not re.search(
                        r"(^|/)(\.env|\.netrc|\.pypirc|id_rsa|pip\.conf|direct_url\.json)$",
                        member.name,
                    )
                    if member.isfile():
                        seen += 1
                        content = archive.extractfile(member).read()  # type: ignore[union-attr]
                        if any(each in content for each in _BEGINNINGS):  # for speed
                            found = _SECRETS.search(content)
                            assert found is None, f"{member.name}: {found[0]!r}"
    assert seen > 1000


def test_its_labels_say_what_it_is(made: WrittenImage, docker: ContainerEngine, engines: Bundle):
    found = docker.inspect("image", STANDIN_TAG)
    assert found is not None
    labels = found["Config"]["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"]
    assert labels["canvasrt.target"] == "cpu"
    assert labels["canvasrt.precision"] == "fp32"
    assert labels["canvasrt.engines"] == engines.manifest.digest
    assert labels["canvasrt.checkpoint"].startswith("sha256:")
    assert found["Config"]["User"] == "1000:1000"
    assert found["Id"] == made.image.image_id


def test_it_answers_over_three_protocols(docker: ContainerEngine, running: str):
    said = tools.inside(docker, running, THREE_PROTOCOLS)
    assert said["http"] == said["grpc"] == said["openai"]


def test_it_runs_as_nobody_in_particular(docker: ContainerEngine, running: str):
    status = docker.out("exec", running, "cat", "/proc/1/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["Uid"].split() == ["1000"] * 4
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == "2"  # the seccomp filter is on
    assert docker.run("exec", running, "touch", "/opt/canvasrt/x").returncode != 0


def test_nims_commands_work_inside(docker: ContainerEngine):
    said = docker.out("run", "--rm", *tools.HARDENED, STANDIN_TAG, "list-model-profiles")
    assert "onnxruntime-fp32" in said


def test_a_stop_under_load_loses_no_request(docker: ContainerEngine, running: str):
    """This must be the last test that uses the shared container, since the container is stopped."""
    client = tools.enter(docker, running, _LOAD)
    assert client.stdout is not None
    assert client.stdout.readline() == "asked\n"
    docker.out("stop", "--time", "60", running)
    out, _ = client.communicate(timeout=60)
    told = json.loads(out.splitlines()[-1])
    assert not told["errors"]
    assert len(told["answers"]) == 4
    assert tools.state(docker, running)["ExitCode"] == 0


def test_a_corrupt_engine_is_one_clear_line(
    docker: ContainerEngine, engines: Bundle, tmp_path: Path
):
    damaged = tmp_path / "engines"
    shutil.copytree(engines.path, damaged)
    body = damaged / "body_0.bin"
    body.write_bytes(bytes(64) + body.read_bytes()[64:])
    mount = f"{damaged}:/opt/canvasrt/package/engines:ro"
    done = docker.run("run", "--rm", *tools.HARDENED, "--volume", mount, STANDIN_TAG, timeout=120)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: tritonserver")]
    assert "body_0.bin" in error


def test_docker_builds_the_same_without_a_network(
    docker: ContainerEngine, base: Path, engines: Bundle, tmp_path: Path
):
    write_archive(base, BASE, tmp_path / "base.tar")
    docker.out("load", "--input", str(tmp_path / "base.tar"))
    options = PackageOptions(wheels=True, tag="canvasrt-built:1").on(BASE, "3.11")
    context = package(engines.path, tmp_path / "context", options=options)
    offline = ("--network", "none", "--build-arg", "PIP_NO_INDEX=1")
    docker.out("build", *offline, "--tag", options.tag, str(context.path))
    with tools.container(docker, options.tag, *tools.HARDENED) as name:
        healthy(docker, name)
        assert tools.inside(docker, name, THREE_PROTOCOLS)["openai"]
    built, written = (docker.inspect("image", tag) for tag in (options.tag, STANDIN_TAG))
    assert built is not None
    assert written is not None
    for setting in ("Entrypoint", "Cmd", "User", "Healthcheck", "WorkingDir", "StopSignal"):
        assert built["Config"][setting] == written["Config"][setting], setting
    assert sorted(built["Config"]["Env"]) == sorted(written["Config"]["Env"])
    # A Dockerfile cannot know the digest of its base, so it sets no labels about the base.
    labels = written["Config"]["Labels"]
    known = {name: text for name, text in labels.items() if ".image.base." not in name}
    assert built["Config"]["Labels"] == known
    owned = [
        sorted(docker.out("run", "--rm", *_FIND, tag, *_OWNERS).splitlines())
        for tag in (options.tag, STANDIN_TAG)
    ]
    assert owned[0] == owned[1]
    assert len(owned[0]) > 10
    for tag in (options.tag, STANDIN_TAG):
        writable = docker.out("run", "--rm", *_FIND, tag, "/opt", "!", "-user", "root")
        assert writable.split() == ["/opt/nim/.cache"]


def test_a_dead_server_is_restarted(docker: ContainerEngine):
    """The container has an init, CANVASRT_END_UNHEALTHY and a restart policy, as in the compose file."""
    options = ("--init", "--restart", "unless-stopped", "--env", "CANVASRT_END_UNHEALTHY=1")
    often = ("--health-interval", "1s", "--stop-signal", "SIGKILL")
    with tools.container(docker, STANDIN_TAG, *tools.HARDENED, *options, *often) as name:
        healthy(docker, name)
        first = tools.state(docker, name)["Pid"]
        docker.out("exec", name, "python3", "-c", _STOP_ALL)
        assert eventually(lambda: tools.state(docker, name)["Pid"] not in (first, 0), 120)
        healthy(docker, name)
        found = docker.inspect("container", name)
        assert found is not None
        assert found["RestartCount"] == 1


def test_kernels_lie_in_the_volume_and_a_killed_start_goes_on(
    docker: ContainerEngine, graphs: Bundle, tmp_path: Path
):
    """The GPU is fake; the environment, the user and the read-only root are real. Compiled kernels take more than the
    256 MiB of /tmp. Compiling a shape takes as long as the plan allows per layer, and the server is ready before its
    probes give up."""
    gpu = rehearsal(graphs, tmp_path / "machine", seen_as=Path("/rehearsal"))
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    image = docker.inspect("image", STANDIN_TAG)
    assert image is not None
    path = dict(each.split("=", 1) for each in image["Config"]["Env"])["PATH"]
    settings = {
        **gpu.environment,
        "PATH": f"/rehearsal/bin:{path}",
        "REHEARSAL_COMPILE": str(_COMPILE_SECONDS),
        "REHEARSAL_KERNELS": str(PER_SHAPE),
    }
    mounts = {gpu.folder: "/rehearsal", gpu.package: "/opt/canvasrt/package", cache: CACHE}
    options = [*tools.HARDENED, "--tmpfs", "/tmp:mode=1777,size=256m"]
    options += [word for name, text in settings.items() for word in ("--env", f"{name}={text}")]
    options += [word for of, to in mounts.items() for word in ("--volume", f"{of}:{to}")]
    with tools.container(docker, STANDIN_TAG, *options) as name:
        assert eventually(lambda: gpu.events()["compile"] >= 4), docker.logs(name, 40)
        docker.out("kill", name)
    before = gpu.events()["compile"]
    manifest = load_bundle(gpu.engines, check=False).manifest
    allowed = sizes_of(manifest, find_target("rtx-5090")).startup
    for start in ("second", "third"):
        gpu.forget()
        began = time.monotonic()
        with tools.container(docker, STANDIN_TAG, *options) as name:
            healthy(docker, name)
            assert time.monotonic() - began + before * _COMPILE_SECONDS < allowed
            said = tools.inside(docker, name, THREE_PROTOCOLS)
            assert said["http"] == said["grpc"] == said["openai"]
            assert "are not stored" not in json.dumps(docker.logs(name, 400))
        compiled = kernels_in(cache)
        shapes = compiled.stat().st_size // PER_SHAPE
        assert compiled.stat().st_size > 256 << 20
        if start == "second":  # a shape may be lost while it is compiled
            assert before + gpu.events()["compile"] - shapes in (0, 1)
        else:
            assert gpu.events()["compile"] == 0


def test_podman_runs_it_too(made: WrittenImage):
    with tools.podman() as engine:
        assert STANDIN_TAG in engine.out("load", "--input", str(made.image.path))
        with tools.container(engine, f"localhost/{STANDIN_TAG}", *tools.HARDENED) as name:
            check = ("healthcheck", "run", name)
            assert eventually(lambda: engine.run(*check).returncode == 0, 60), engine.logs(name, 40)
            engine.out("stop", "--time", "45", name)
            assert tools.state(engine, name)["ExitCode"] == 0


@pytest.fixture
def free_ports() -> Iterator[tuple[str, ...]]:
    """Return options with free ports of the host's network, which stay reserved for the servers that are told of them."""
    with Ports(0, 0, 0).held("0.0.0.0") as held:
        ports = {"--port": held.metrics, "--grpc-port": held.grpc, "--http-port": held.http}
        yield tuple(str(word) for each in ports.items() for word in each)


def test_deploy_runs_it_until_it_is_ready(
    docker: ContainerEngine, made: WrittenImage, command: Command, free_ports: tuple[str, ...]
):
    options = ("--network", "host", "--name", "canvasrt-deployed", "--env", "CANVASRT_THREADS=1")
    options += free_ports
    try:
        done = command("deploy", made.image.path, *options, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        asked = command("infer", "12+34=", "--protocol", "grpc", "--url", said["grpc"])
        assert asked.returncode == 0, asked.stderr
        again = command("deploy", STANDIN_TAG, *options)
        assert again.returncode == 1
        assert f"port {free_ports[1]} on 127.0.0.1 is in use" in again.stderr
    finally:
        docker.run("rm", "--force", "--volumes", "canvasrt-deployed")


def test_deploy_shows_the_log_of_what_fails(
    docker: ContainerEngine, made: WrittenImage, command: Command, free_ports: tuple[str, ...]
):
    options = ("--network", "host", "--name", "canvasrt-failing", *free_ports)
    done = command("deploy", STANDIN_TAG, *options, "--env", "NIM_MODEL_PROFILE=no-such")
    assert done.returncode == 1
    assert (
        "error: the container ended with exit code 1: unknown serving profile 'no-such'"
        in done.stderr
    )
    assert docker.inspect("container", "canvasrt-failing") is None


def test_deploy_says_when_docker_has_no_gpu_runtime(
    docker: ContainerEngine, command: Command, free_ports: tuple[str, ...]
):
    """The image's label says that it needs a GPU, and docker has no GPU runtime."""
    text = f"FROM {STANDIN_TAG}\nLABEL canvasrt.target=rtx-5090\n"
    subprocess.run(
        [docker.name, "build", "--tag", "canvasrt-gpu:1", "-"],
        input=text,
        text=True,
        check=True,
        capture_output=True,
    )
    name = ("--name", "canvasrt-gpu")
    done = command("deploy", "canvasrt-gpu:1", "--network", "host", *name, *free_ports)
    assert done.returncode == 1
    assert "cannot give GPUs to containers" in done.stderr
    assert "NVIDIA Container Toolkit" in done.stderr
    assert docker.inspect("container", "canvasrt-gpu") is None
