"""A package of a random model and a real tritonserver for it, shared by all tests."""

from __future__ import annotations

import importlib.util
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.containers.client.triton import Client
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers import library
from tests.helpers.ci import in_ci

if TYPE_CHECKING:
    from openai import OpenAI


def is_skipped() -> bool:
    """Return whether tests that need Triton are skipped. In CI they never are; without Triton, they fail."""
    return importlib.util.find_spec("pytriton") is None and not in_ci()


needs_triton = pytest.mark.skipif(
    is_skipped(),
    reason="nvidia-pytriton is not installed: pip install -e '.[serve]'",
)

# A request with these options never stops early, so it runs far longer than any test waits.
ENDLESS: dict[str, Any] = {"max_denoising_steps": 10_000, "stability_threshold": 10_000}

Local = Callable[..., Result]


def write_random(folder: Path) -> None:
    """Write a random checkpoint with the demo's shape and tokenizer; its blocks take many steps."""
    import torch

    import canvasrt.demo
    from bench.demo.model import build_model
    from bench.demo.tokenizer import build_tokenizer

    torch.manual_seed(3)
    model = build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # makes some tokens likelier than others
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    # Without tokens for calls, since random weights would begin a call every few tokens.
    build_tokenizer(calls=()).save_pretrained(folder)
    # The template of the committed demo, which does not support images.
    committed = Path(canvasrt.demo.__file__).with_name("checkpoint") / "chat_template.jinja"
    (folder / "chat_template.jinja").write_text(committed.read_text("utf-8"))


@pytest.fixture(scope="session")
def graphs() -> Bundle:
    """Graphs of a random model."""
    return load_bundle(library.graphs("served"), kind="graphs", check=False)


@pytest.fixture(scope="session")
def engines(graphs: Bundle) -> Bundle:
    """CPU engines built from these graphs."""
    return load_bundle(library.bundle(graphs.path), kind="engines", check=False)


@pytest.fixture(scope="session")
def packaged(engines: Bundle) -> Bundle:
    return load_bundle(library.package_of(engines.path), kind="package", check=False)


@pytest.fixture(scope="session")
def server(packaged: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server. At the end, it is stopped and checked for stale processes and memory."""
    log = tmp_path_factory.mktemp("server") / "triton.log"
    with (
        repository_of(packaged) as repository,
        Server(repository, Settings(ports=Ports(0, 0, 0), log=str(log))) as running,
    ):
        yield running
    assert not stale(running)


@pytest.fixture(scope="session")
def front(server: Server) -> Iterator[FrontEnd]:
    """An OpenAI front end of the shared server. The model has two names."""
    options = FrontOptions(
        port=0, names=("canvasrt", "alias"), about={"digest": "0123456789abcdef", "thinking": False}
    )
    with FrontEnd.over(server, options) as running:
        yield running


@pytest.fixture(scope="session")
def openai(front: FrontEnd) -> Iterator[OpenAI]:
    """The real client without retries, so that failures are reported at once."""
    from openai import OpenAI  # some GPU machines lack it

    with OpenAI(base_url=front.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.ports.http}", "http", timeout=120) as client:
        yield client


@pytest.fixture
def grpc(server: Server) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.ports.grpc}", "grpc", timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(engines: Bundle) -> Tokenizer:
    return Tokenizer.load(engines)


@pytest.fixture(scope="session")
def local(engines: Bundle, tokenizer: Tokenizer) -> Local:
    """Return a function that generates in this process. The server's answers must be the same."""
    model = open_model(engines.path, threads=1)

    def generate(prompt: str, **options: Any) -> Result:
        params = SamplingParams.from_defaults(model.sampler, model.config, **options)
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        (result,) = Generator(model).run([Request(ids, params)])
        return result

    return generate


def stale(server: Server) -> list[Path]:
    """Return what is left of a stopped server: shared memory and processes with its name."""
    found = list(Path("/dev/shm").glob(f"{server.run_name}*"))
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if server.run_name.encode() in file.read_bytes():
                found.append(file)
        except OSError:
            continue
    return found


def metric(server: Server, name: str) -> float:
    """Return the value of a metric from the server's metrics endpoint."""
    url = f"http://127.0.0.1:{server.ports.metrics}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
    raise AssertionError(f"there is no metric {name}")


def eventually(check: Callable[[], bool], seconds: float = 300) -> bool:
    """Wait until `check` returns true; return whether it did in time."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
