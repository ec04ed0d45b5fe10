"""What a build reuses from the cache when it checks disk space, and where it continues after an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from canvasrt.build import checks, tensorrt
from canvasrt.build import plan as plans
from canvasrt.build.options import BuildOptions
from canvasrt.build.reuse import reusable_graphs
from canvasrt.bundle import Bundle
from canvasrt.cache import EngineCache
from canvasrt.graphs import lower as lowering
from canvasrt.pipeline import build_bundle, graphs_of, plan_all
from canvasrt.progress import listening
from canvasrt.targets import parse_targets
from tests.helpers import library

OPTIONS = BuildOptions("int4")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which even small graphs are removed after use."""
    folder = library.empty_cache(tmp_path / "cache")
    monkeypatch.setenv("CANVASRT_CACHE", str(folder))
    monkeypatch.setattr(plans, "KEPT_GRAPHS", 0)
    return folder


def stand_in(made: plans.Plan, graphs: Bundle, name: str, folder: Path) -> int:
    """Put an empty file for a segment's engine into the cache, and remove the segment's weights, as a build does.
    Return the planned bytes of the engine."""
    (entry,) = (each for each in graphs.manifest.segments if each["name"] == name)
    target = tensorrt._target(made)
    (segment,) = tensorrt._segment(made, graphs, entry, target, folder)
    (folder / "engine").touch()
    EngineCache().keep(segment.made_from, folder / "engine", {})
    segment.graph.with_suffix(".bin").unlink()
    return made.needs.engine_files[name]


def test_engines_in_the_cache_need_no_space_again_and_removed_weights_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    needed: list[int] = []
    monkeypatch.setattr(checks, "check_disk", lambda folders: needed.append(folders[cache]))
    cpu, made = plan_all("demo", parse_targets("cpu,rtx-4090"), tmp_path / "out", OPTIONS)
    # Engines for a CPU and for a GPU are built from the same quantized graphs.
    assert cpu.graphs_from == made.graphs_from
    other = replace(made, max_batch=2)
    graphs = graphs_of(made)
    checks.check_space([made], reusable_graphs([made]))
    assert needed.pop() == made.disk - made.needs.graphs
    engine = stand_in(made, graphs, "body_0", tmp_path)
    checks.check_space([made], reusable_graphs([made]))
    assert needed.pop() == pytest.approx(made.needs.engines - engine, rel=0.02)
    # A build of other engines needs the removed weights, so it exports all graphs again.
    assert reusable_graphs([other]) == reusable_graphs([made, other]) == {"int4": None}
    checks.check_space([other], reusable_graphs([other]))
    assert 0.9 * other.disk < needed.pop() <= other.disk
    for name in ("head", "vision"):
        stand_in(made, graphs, name, tmp_path)
    checks.check_space([made], reusable_graphs([made]))
    assert needed.pop() == 0


def test_large_graphs_go_as_they_are_lowered(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted build continues after the last lowered graph."""
    done, lower = list[str](), lowering.lower_graph

    def interrupted(source: Path, out: Path) -> None:
        done.append(source.stem)
        if done == ["body_0", "head"]:
            raise KeyboardInterrupt
        lower(source, out)

    monkeypatch.setattr(lowering, "lower_graph", interrupted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        build_bundle("demo", "cpu", out, OPTIONS)
    weights = {each.name for each in cache.glob("graphs/*/*.bin")}
    assert "body_0.bin" not in weights
    assert "head.bin" in weights
    made = build_bundle("demo", "cpu", out, OPTIONS)
    assert done == ["body_0", "head", "head", "vision"]
    assert not any(cache.glob("graphs/*/body_*.bin"))
    assert not any(cache.glob("lowerings/*"))
    said: set[str] = set()
    with listening(lambda what, *_: said.add(what)):
        whole = build_bundle("demo", "cpu", tmp_path / "whole", OPTIONS)
    assert "lowering graphs for a CPU" in said
    assert made.manifest.digest == whole.manifest.digest
    assert made.manifest.embedding["host_head"]  # the graphs have it, too
