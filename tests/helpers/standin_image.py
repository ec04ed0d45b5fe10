"""Fixtures: a package's image on a substitute for NVIDIA's base image, and docker with this image loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.standin import standin
from canvasrt.bundle import Bundle
from canvasrt.containers.deploy.container_engine import ContainerEngine
from canvasrt.containers.image.build import WrittenImage, write_image
from canvasrt.containers.package.options import PackageOptions
from tests.helpers import container_tools as tools
from tests.helpers.serving import eventually

STANDIN_TAG = "canvasrt-runs:1"
SECRET = "hf_canaryCanaryCanaryCanaryCanary01"
KEY = "nvapi-" + "canary_" * 8
# Asks a server over three protocols, and prints the answers.
THREE_PROTOCOLS = """
import json, openai
from canvasrt.containers.client.triton import Client
ask = {"prompt": "12+34=", "max_new_tokens": 8, "seed": 3}
said = {}
for protocol, port in (("http", 8080), ("grpc", 8001)):
    with Client(f"127.0.0.1:{port}", protocol, timeout=60) as client:
        said[protocol] = client.infer(ask).text
client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
reply = client.chat.completions.create(
    model=model, seed=3, max_tokens=8, messages=[{"role": "user", "content": "12+34="}])
said["openai"] = reply.choices[0].message.content
print(json.dumps(said))
"""


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    """Keep the base image and the wheels between test runs, since they are downloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANVASRT_CACHE", str(Path.home() / ".cache" / "canvasrt-tests"))
        yield


@pytest.fixture(scope="module")
def base(_kept: None) -> Path:
    if shutil.which("mmdebstrap") is None:
        tools.missing("mmdebstrap is not installed (apt: mmdebstrap)")
    return standin()


@pytest.fixture(scope="module")
def made(base: Path, engines: Bundle, tmp_path_factory: pytest.TempPathFactory) -> WrittenImage:
    out = tmp_path_factory.mktemp("image") / "image.tar"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        patch.setenv("NGC_API_KEY", KEY)
        return write_image(
            engines.path, out, format="docker", base=base, options=PackageOptions(tag=STANDIN_TAG)
        )


@pytest.fixture(scope="module")
def docker(made: WrittenImage) -> Iterator[ContainerEngine]:
    with tools.docker() as engine:
        assert STANDIN_TAG in engine.out("load", "--input", str(made.image.path))
        yield engine


def healthy(engine: ContainerEngine, name: str) -> None:
    def is_healthy() -> bool:
        state = tools.state(engine, name)
        assert state["Running"], engine.logs(name, 40)
        return bool(state["Health"]["Status"] == "healthy")

    assert eventually(is_healthy, 60), engine.logs(name, 40)
