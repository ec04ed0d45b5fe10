"""The first start of an image on a GPU, rehearsed: its environment, user and read-only root are real, the GPU is fake."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.containers.deploy.container_engine import ContainerEngine
from canvasrt.containers.package.sizes import _COMPILE_SECONDS, sizes_of
from canvasrt.targets import find_target
from tests.helpers import container_tools as tools
from tests.helpers.rehearsal import kernels_in, rehearsal
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.standin_image import (
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


def test_kernels_lie_in_the_volume_and_a_killed_start_goes_on(
    docker: ContainerEngine, graphs: Bundle, tmp_path: Path
):
    """/tmp has 256 MiB, and the compiled kernels take more. A shape takes as long as the plan allows a layer, and the server
    is ready before its probes give up."""
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
        if start == "second":  # the shape that was being compiled may be lost
            assert before + gpu.events()["compile"] - shapes in (0, 1)
        else:
            assert gpu.events()["compile"] == 0
