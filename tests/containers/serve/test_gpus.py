"""Triton's options on a machine with GPUs, and the time limit until it is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canvasrt import machine
from canvasrt.bundle import Bundle
from canvasrt.containers.names import GPUS_VARIABLE
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve import serve
from canvasrt.containers.serve.gpus import environment_of, gpus_of
from canvasrt.containers.serve.installation import Installation
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.serving_profiles import choose_profile
from canvasrt.containers.serve.settings import Settings
from canvasrt.errors import CanvasError
from canvasrt.machine import VISIBLE, Gpu

GPU = Gpu("NVIDIA GeForce RTX 5090", 32 << 30, (12, 0), "580.95", "GPU-0")
INSTALLATION = Installation(Path("tritonserver"), None)


def test_triton_is_given_addresses_as_it_takes_them() -> None:
    front = FrontOptions(host="localhost")
    server = Server(Path("repository"), Settings(front=front, triton_host="::1"))
    command = server._command(INSTALLATION, Path("scratch"))
    assert [each for each in command if "-address=" in each] == [
        "--http-address=ipv6:::1",
        "--grpc-address=[::1]",
        "--metrics-address=127.0.0.1",
    ]


@pytest.mark.parametrize(
    ("named", "there", "pools"),
    [((), 0, []), ((), 1, ["0:0"]), (("GPU-1", "GPU-0"), 4, ["0:0", "1:0"])],
)
def test_triton_takes_no_memory_of_the_gpus_it_sees(
    named: tuple[str, ...], there: int, pools: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs are not searched for in /dev, since under WSL it has none."""
    monkeypatch.setattr(machine, "_listed", lambda: (GPU,) * there)
    monkeypatch.delenv(VISIBLE, raising=False)
    server = Server(Path("repository"), gpus=named)
    command = server._command(INSTALLATION, Path("scratch"))
    assert "--pinned-memory-pool-byte-size=0" in command
    name = "--cuda-memory-pool-byte-size="
    assert [each.removeprefix(name) for each in command if each.startswith(name)] == pools
    seen = server._environment(INSTALLATION, Path("scratch"))
    assert (seen.get(VISIBLE), seen.get(GPUS_VARIABLE)) == (
        (",".join(named), str(len(named))) if named else (None, None)
    )


def test_a_mig_instance_that_is_named_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi lists only whole GPUs, and the first of them may be another GPU than the instance's."""
    monkeypatch.setenv(VISIBLE, "MIG-1")
    assert environment_of(["GPU-0"]) == {}


@pytest.mark.parametrize(
    ("devices", "names", "serve_them"),
    [
        (None, "AAA", [0]),
        ("all", "AAA", [0, 1, 2]),
        ("all", "ABA", [0, 2]),
        ("all", "", []),
    ],
)
def test_all_devices_are_those_of_the_first_one_s_name(
    devices: str | None,
    names: str,
    serve_them: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = [replace(GPU, name=name, uuid=f"GPU-{number}") for number, name in enumerate(names)]
    monkeypatch.setattr(machine, "gpus", lambda: there)
    profile: Any = SimpleNamespace(gpus=list)
    found = gpus_of(Settings(Path("bundle"), devices=devices), profile)
    assert found == [there[number] for number in serve_them]
    assert ("different bits: B" in capsys.readouterr().err) == ("B" in names)


@pytest.mark.parametrize(
    ("planned", "given", "gpus", "wanted"),
    [
        (4321, None, 0, 4321),
        (4321, None, 1, 4321),
        (4321, None, 3, 4321 + 2 * 500),
        (4321, 9.0, 3, 9.0),
    ],
)
def test_the_plan_says_when_it_must_be_ready(
    planned: int, given: float | None, gpus: int, wanted: float, packaged: Bundle, monkeypatch: Any
) -> None:
    """GPUs are warmed up one after another, and only the first compiles kernels."""

    def over(server: Server, front: Any) -> None:
        raise CanvasError(f"{server._ready_timeout:g} s")

    def chosen(*arguments: Any) -> Any:
        return replace(choose_profile(*arguments), startup=planned, further=500)

    monkeypatch.setattr(serve, "choose_profile", chosen)
    monkeypatch.setattr(serve, "gpus_of", lambda *_: [GPU] * gpus)
    monkeypatch.setattr(serve.FrontEnd, "over", over)
    settings = Settings(packaged.path, ready_timeout=given)
    with pytest.raises(CanvasError, match=rf"^{wanted:g} s$"):
        serve.run_server(settings, lambda said: None, open("/dev/null", "w"))  # noqa: SIM115
