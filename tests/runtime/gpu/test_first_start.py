"""A server's first start on a fake GPU: compiled kernels, contexts, memory, and the trial of shared passes."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvasrt.build.expert_forms import SLOTS
from canvasrt.build.memory import context_count
from canvasrt.bundle import load_bundle
from canvasrt.containers.package.sizes import sizes_of
from canvasrt.runtime.backends.compiled_kernels import LEFT, PARTIAL, UNUSED, CompiledKernels
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.gpu.prefix_pages import HEADROOM
from canvasrt.runtime.gpu.sharing import prove
from canvasrt.targets import find_target
from tests.helpers.fake_tensorrt import IRuntimeCache, IRuntimeConfig
from tests.helpers.gpu_server import BATCH, Server, _few_tokens, few_slots, folder
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, requests, same

__all__ = ["_few_tokens", "few_slots", "folder"]


def aged(file: Path, seconds: float) -> None:
    """Write a file whose modification time is more than this many seconds ago."""
    file.write_bytes(b"half")
    os.utime(file, (time.time() - seconds - 60,) * 2)


def test_a_start_that_is_killed_goes_on_from_its_last_shape(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start removes the partial file of the killed process. The start after that compiles nothing."""
    file = tmp_path / "cache" / "compiled"
    planned = sizes_of(load_bundle(folder, check=False).manifest, find_target("rtx-5090"))
    whole = Server(folder)
    whole.model.warm_up()
    assert whole.device.waited < planned.startup
    killed = Server(folder, compiled=file)
    kept, left = killed.backend.keep_compiled, [6]

    def keep() -> None:
        kept()
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(killed.backend, "keep_compiled", keep)
    with pytest.raises(KeyboardInterrupt):
        killed.model.warm_up()
    before = sum(killed.compiled().values())
    aged(file.parent / f"{file.name}{PARTIAL}x", LEFT)
    again = Server(folder, compiled=file)
    again.model.warm_up()
    assert before
    assert sum(again.compiled().values()) == sum(whole.compiled().values()) - before
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    last = Server(folder, compiled=file)
    last.model.warm_up()
    assert not last.compiled()
    assert last.device.waited < 0.2 * whole.device.waited


def opened(file: Path) -> tuple[CompiledKernels, IRuntimeCache]:
    kernels = CompiledKernels(file)
    return kernels, kernels.of(IRuntimeConfig())


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A file with one kernel, the only file of its folder."""
    file = tmp_path / "cache" / "compiled"
    kernels, cache = opened(file)
    cache.known.add("old")
    kernels.keep()
    return file


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_kernels_that_nobody_uses_are_removed_and_no_other_server_s(stored: Path) -> None:
    """Servers share a volume. While one starts, another may write its kernels or use kernels of other engines."""
    os.utime(stored, (0, 0))
    live = stored.with_name(f"{stored.name}{PARTIAL}live")
    others = stored.with_name("of-other-engines")
    live.touch()
    others.touch()
    aged(stored.with_name("unused"), UNUSED)
    assert opened(stored)[1].known == {"old"}
    assert set(stored.parent.iterdir()) == {stored, live, others}


@pytest.mark.parametrize("how", ["full", "read-only since", "nothing"])
def test_kernels_that_cannot_be_kept_are_a_warning(
    how: str, stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full volume, no partial file is left, and earlier files stay. If the volume has become read-only, the
    partial file cannot be removed."""
    kernels, cache = opened(stored)
    cache.known.add("new")
    if how == "nothing":
        monkeypatch.setattr(cache, "serialize", lambda: None)
    else:
        monkeypatch.setattr(Path, "replace", refuse)
    if how == "read-only since":
        monkeypatch.setattr(Path, "unlink", refuse)
    kernels.keep()
    assert "compiled kernels are not stored" in capsys.readouterr().err
    assert stored in stored.parent.iterdir()
    assert len(list(stored.parent.iterdir())) == 1 + (how == "read-only since")


def test_a_read_only_volume_gives_the_kernels_that_it_has(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume also has a partial file of a killed start, which cannot be removed."""
    aged(stored.with_name(f"{stored.name}{PARTIAL}x"), LEFT)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert opened(stored)[1].known == {"old"}


def test_kernels_that_may_not_be_read_are_a_warning(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder belongs to another account, so even `stat` fails for its files."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        patch.setattr(Path, "read_bytes", refuse)
        assert not opened(stored)[1].known
    assert "cannot read compiled kernels" in capsys.readouterr().err


def test_what_another_gpu_compiled_is_not_taken(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IRuntimeCache, "gpu", "another")
    assert not opened(stored)[1].known


def test_the_plan_counts_every_context(few_slots: None, folder: Path) -> None:
    server = Server(folder, apart=False)
    server.model.warm_up()
    config, bodies = server.model.config, len(server.model.segments) - 1
    planned = context_count(config, server.model.shapes, bodies, SLOTS)
    assert server.device.count("context") == planned


def test_contexts_that_cannot_be_had_cost_nothing_but_time(
    folder: Path, tiny: Pair, prompt: Prompt, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pass without its own context runs in a shared context."""
    server = Server(folder)
    own = (len(server.model.segments) - 1) * BATCH + 1
    server.device.left = 0  # the shared contexts exist already
    server.model.warm_up()
    wanted = requests(tiny, prompt, [40, 50, 60], max_new_tokens=CANVAS)
    same(Generator(server.model, BATCH).run(wanted), Generator(tiny.model).run(wanted))
    assert capsys.readouterr().err.count("runs in a shared context, which is slower") == own


def test_prefixes_leave_memory_for_captures(folder: Path) -> None:
    server = Server(folder)
    server.model.warm_up()
    server.device.left = HEADROOM + (4 << 20)
    assert 0 < server.model.reserve(1 << 30) <= 4 << 20
    assert server.device.left >= HEADROOM


OWN = "in the request's own pass over 1024 cached tokens"
OTHERS = "with other requests"


@pytest.mark.parametrize("broken", [None, "alone", OTHERS, OWN], ids=lambda each: str(each))
def test_requests_share_passes_where_that_changes_no_bit(
    broken: str | None, folder: Path, tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken device computes other last bits in one case: at one place, next to other requests, or in passes of
    another size."""
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 1024)
    server = Server(folder)
    model, run, lengths = server.model, DeviceModel._output, set()

    def output(model: DeviceModel, this: Any, item: Any, states: Any) -> Any:
        found = run(model, this, item, states)
        lengths.add(item.row.length)
        differs = {
            "alone": this.batch > 1 and len(this.rows) == 1 and item.row.kv_slot == 2,
            OTHERS: len(this.rows) > 1 and item.row.kv_slot == 1,
            OWN: this.batch == 1 and this.width == 1024,
        }
        # The host's products may differ in last bits, so results are replaced: they are exact unless the case is
        # broken.
        noise = np.uint8(broken is not None and differs[broken])
        exact = np.full(found.entropy.shape, noise, np.float32)
        return replace(found, entropy=exact, hidden=exact, canvas=exact, argmax=exact)

    monkeypatch.setattr(DeviceModel, "_output", output)
    monkeypatch.setattr(DeviceModel, "_fetch", lambda *_: np.zeros(1))
    evidence = prove(model)
    monkeypatch.undo()
    # Requests run alone, with others, and in own passes of two widths. With a prompt that fills the second width, they
    # run in one own pass.
    assert evidence.compared == 4 * 4 * BATCH + 4 + 3
    assert {1024, model.max_context - CANVAS} <= lengths
    proved = () if broken else (1024, 2048)
    timed = (1024, 2048) if broken in (None, OWN) else ()
    assert (evidence.shared, tuple(evidence.own_ms)) == (broken is None, timed)
    assert ("`--share-passes on` is exact" in evidence.why) == (broken == OWN)
    assert bool(evidence.why) == (broken is not None)
    assert broken is None or broken in evidence.why
    assert (model.shapes.shares, tuple(model.own_passes.seconds)) == (broken is None, proved)
    wanted = requests(tiny, prompt, [40, 50], max_new_tokens=CANVAS, max_denoising_steps=3)
    same(Generator(model, BATCH).run(wanted), Generator(tiny.model).run(wanted))
    server.device.stalls.clear()
    Generator(model, BATCH).run(wanted[:1])
    assert not server.compiled()
