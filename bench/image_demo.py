"""`make image-demo`: builds the demo's image without a daemon, runs it hardened, and calls it over three protocols."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.daemon import docker
from bench.standin import standin
from canvasrt.console import progress, size
from canvasrt.containers.deploy.command import run_command
from canvasrt.containers.deploy.container_engine import ContainerEngine, find_engine
from canvasrt.containers.deploy.deploy import check_ports, wait_ready
from canvasrt.containers.deploy.options import DeployOptions
from canvasrt.containers.deploy.packages import load, open_package
from canvasrt.containers.image.build import write_image
from canvasrt.containers.package.options import PackageOptions
from canvasrt.demo.tasks import is_correct
from canvasrt.errors import CanvasError
from canvasrt.pipeline import build_bundle

DEMO_PROMPT = "12+34="
DEMO_TAG = "canvasrt-demo:latest"
NAME = "canvasrt-demo"
_PROTOCOLS = {
    "openai": "http://127.0.0.1:8000/v1",
    "http": "127.0.0.1:8080",
    "grpc": "127.0.0.1:8001",
}


def measure() -> None:
    """Run the demo in a container, and print how long each step took."""
    with tempfile.TemporaryDirectory(prefix="canvasrt-image-demo-") as folder, engine() as found:
        run_image_demo(Path(folder), found)


def run_image_demo(folder: Path, engine: ContainerEngine) -> None:
    """Run the steps. Raises CanvasError for the first step that fails."""
    clock = _Clock()
    with progress():
        base = standin()
        clock.report("base image (kept for the next run)")
        build_bundle("demo", "cpu", folder / "engines")
        clock.report("demo built for the CPU")
        made = write_image(
            folder / "engines",
            folder / "image.tar",
            format="docker",
            base=base,
            options=PackageOptions(tag=DEMO_TAG),
        )
    added = f"{size(made.other_bytes)} and {size(made.engine_bytes)} of engines on the base"
    clock.report(f"image written: {added}; {made.image.digest}")
    package = open_package(str(folder / "image.tar"), engine)
    load(package, engine)
    clock.report(f"loaded into {engine.name}")
    # The host's network behaves the same in every version of docker and podman.
    options = DeployOptions(name=NAME, network="host", http_port=8080)
    check_ports(options)
    try:
        done = engine.run(*run_command(package, options, engine, restart=False)[1:])
        if done.returncode != 0:
            raise CanvasError(
                f"{engine.name} cannot run the image: {done.stderr.strip()}",
                "`canvasrt doctor` says what this machine lacks",
            )
        wait_ready(engine, NAME, 120)
        clock.report("ready: read-only, as user 1000, without capabilities")
        for protocol, url in _PROTOCOLS.items():
            answer = _ask(protocol, url)
            clock.report(f"{protocol:<6} {DEMO_PROMPT}{answer}")
        engine.out("stop", "--time", "45", NAME)
        state = (engine.inspect("container", NAME) or {})["State"]
        if state["ExitCode"] != 0:
            raise CanvasError(
                f"the container stopped with exit code {state['ExitCode']}",
                "start it with `canvasrt deploy`, stop it, and see its log",
            )
        clock.report("stopped")
    finally:
        engine.run("rm", "--force", "--volumes", NAME)
    print(f"{clock.total:6.1f} s in total")


@contextmanager
def engine() -> Iterator[ContainerEngine]:
    """Provide docker, with a temporary daemon if none answers; without docker, provide podman."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(docker())
        except CanvasError:
            found = find_engine()
        yield found


def _ask(protocol: str, url: str) -> str:
    """Ask the question with `canvasrt infer`, as a user would."""
    command = [sys.executable, "-m", "canvasrt", "infer", DEMO_PROMPT, "--url", url]
    done = subprocess.run(
        [*command, "--protocol", protocol], capture_output=True, text=True, timeout=120
    )
    answer = done.stdout.strip()
    if done.returncode != 0 or not is_correct(DEMO_PROMPT, answer):
        reply = answer if done.returncode == 0 else done.stderr.strip()
        raise CanvasError(
            f"over {protocol}, {DEMO_PROMPT} was answered with {reply!r}",
            "repeat it with `canvasrt deploy` and `canvasrt --debug infer`",
        )
    return answer


class _Clock:
    """Prints each step and how long it took."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()

    @property
    def total(self) -> float:
        return time.monotonic() - self._started

    def report(self, what: str) -> None:
        now = time.monotonic()
        print(f"{now - self._last:6.1f} s  {what}", flush=True)
        self._last = now
