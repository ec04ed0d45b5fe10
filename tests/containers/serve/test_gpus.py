"""What Triton is told on a machine with GPUs, and how long it may take to be ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canvasrt import machine
from canvasrt.bundle import Bundle
from canvasrt.containers.names import GPUS_VARIABLE, READY_TIMEOUT
from canvasrt.containers.serve import serve
from canvasrt.containers.serve.installation import Installation
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.serving_profiles import choose_profile
from canvasrt.containers.serve.settings import Settings
from canvasrt.errors import CanvasError
from canvasrt.machine import VISIBLE, Gpu

GPU = Gpu("NVIDIA GeForce RTX 5090", 32 << 30, (12, 0), "580.95", "GPU-0")
INSTALLATION = Installation(Path("tritonserver"), None)


@pytest.mark.parametrize(
    ("named", "there", "pools"),
    [((), 0, []), ((), 1, ["0:0"]), (("GPU-1", "GPU-0"), 4, ["0:0", "1:0"])],
)
def test_triton_takes_no_memory_of_the_gpus_it_sees(
    named: tuple[str, ...], there: int, pools: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of none by /dev, which has no GPU under Windows."""
    monkeypatch.setattr(machine, "_listed", lambda: (GPU,) * there)
    monkeypatch.delenv(VISIBLE, raising=False)
    server = Server(Path("repository"), gpus=named)
    command = server._command(INSTALLATION, Path("scratch"))
    assert "--pinned-memory-pool-byte-size=0" in command
    name = "--cuda-memory-pool-byte-size="
    assert [each.removeprefix(name) for each in command if each.startswith(name)] == pools
    seen = server._environment(INSTALLATION)
    assert (seen.get(VISIBLE), seen.get(GPUS_VARIABLE)) == (
        (",".join(named), str(len(named))) if named else (None, None)
    )


@pytest.mark.parametrize(
    ("planned", "given", "wanted"),
    [(10, None, READY_TIMEOUT), (4321, None, 4321), (4321, 9.0, 9.0)],
)
def test_the_plan_says_when_it_must_be_ready(
    planned: int, given: float | None, wanted: float, packaged: Bundle, monkeypatch: Any
) -> None:
    def over(server: Server, front: Any) -> None:
        raise CanvasError(f"{server._ready_timeout:g} s")

    def chosen(*arguments: Any) -> Any:
        return replace(choose_profile(*arguments), startup=planned)

    monkeypatch.setattr(serve, "choose_profile", chosen)
    monkeypatch.setattr(serve.FrontEnd, "over", over)
    settings = Settings(packaged.path, ready_timeout=given)
    with pytest.raises(CanvasError, match=rf"^{wanted:g} s$"):
        serve.run_server(settings, lambda said: None, open("/dev/null", "w"))  # noqa: SIM115
