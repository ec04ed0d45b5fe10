"""Opening models on several GPUs, with fake devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from canvasrt.bundle import load_bundle
from canvasrt.containers.triton.start import open_all
from canvasrt.runtime.gpu import sharing
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import _compiled_kernels
from tests.helpers.fake_tensorrt import FakeCudaDevice
from tests.helpers.gpu_server import Server, _few_tokens, folder

__all__ = ["_few_tokens", "folder"]


@pytest.mark.parametrize("other", ["RTX 5090", "RTX 5080"])
def test_a_gpu_takes_what_another_of_its_name_compiled(
    other: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of the same name share a file of compiled kernels. GPUs of different names have separate files."""
    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path / "cache"))
    compiled = partial(_compiled_kernels, load_bundle(folder, check=False).manifest)
    servers: list[Server] = []

    def open_one(number: int) -> Model:
        monkeypatch.setattr(FakeCudaDevice, "name", ("RTX 5090", other)[number])
        servers.append(Server(folder, compiled=compiled))
        return servers[-1].model

    open_all(open_one, 2, proves=False)
    assert servers[0].compiled()
    assert bool(servers[1].compiled()) == (other != "RTX 5090")
    assert len(list((tmp_path / "cache" / "compiled").iterdir())) == len({"RTX 5090", other})


@pytest.mark.parametrize("refuses", [0, 1, None])
def test_requests_share_passes_only_if_every_gpu_proved_it(
    refuses: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [Server(folder) for _ in range(2)]

    def prove(model: object) -> sharing.Evidence:
        shared = refuses is None or model is not servers[refuses].model
        model.share_passes(shared)  # type: ignore[attr-defined]
        return sharing.Evidence(shared, 1, "" if shared else "bits differ")

    monkeypatch.setattr(sharing, "prove", prove)
    models, evidence = open_all(lambda number: servers[number].model, 2, proves=True)
    assert [each.rows_apart for each in models] == [refuses is not None] * 2
    assert evidence["shared"] == (refuses is None)


@pytest.mark.parametrize(("other", "proves"), [(0, False), (1e-6, True)])
def test_a_gpu_that_computes_other_bits_takes_no_requests(
    other: float,
    proves: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second GPU's entropies differ from the first GPU's in every pass. They are consistent in themselves, so the
    second GPU's own trial would allow shared passes."""
    servers, run = [Server(folder) for _ in range(3)], DeviceModel._output

    def output(model: DeviceModel, *given: Any) -> Any:
        found = run(model, *given)
        exact = np.ones_like(found.entropy) + other * (model is servers[1].model)
        return replace(found, entropy=exact, hidden=exact, canvas=exact, argmax=exact)

    monkeypatch.setattr(DeviceModel, "_output", output)
    monkeypatch.setattr(DeviceModel, "_fetch", lambda *_: np.zeros(1))
    models, evidence = open_all(lambda number: servers[number].model, 3, proves)
    same = [servers[n].model for n in ((0, 2) if other else (0, 1, 2))]
    assert models == same
    assert evidence.get("shared", False) == proves
    assert ("GPU 1 gets no requests" in capsys.readouterr().err) == bool(other)


def test_a_context_without_room_for_a_canvas_needs_no_trial() -> None:
    sizes = {"max_batch": 2, "max_context": 200, "canvas_length": 256}
    model = MagicMock(spec=DeviceModel, rows_apart=True, **sizes)
    models, evidence = open_all(lambda _: model, 1, proves=True)
    assert models == [model]
    assert "no room for a whole canvas" in evidence["why"]
    model.warm_up.assert_called_once_with()


def test_prompts_of_the_trial_fit_a_short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts must fit passes of every width."""
    lengths: list[int] = []
    monkeypatch.setattr(sharing, "_fill", lambda model, row, prompt: lengths.append(len(prompt)))
    monkeypatch.setattr(sharing, "_step", MagicMock())
    sizes = {"max_batch": 50, "max_context": 96, "canvas_length": 32}
    shapes, config = SimpleNamespace(widths=(64,)), SimpleNamespace(vocab_size=100)
    model: Any = MagicMock(spec=DeviceModel, shapes=shapes, config=config, **sizes)
    sharing._Trial(model).requests({})
    assert len(lengths) == 50
    assert max(lengths) <= 64
