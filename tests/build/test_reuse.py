"""What a build counts as done when it checks the disk."""

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
from canvasrt.pipeline import graphs_of, plan_all
from canvasrt.targets import find_target
from tests.helpers import library

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")


def stand_in(made: plans.Plan, graphs: Bundle, name: str, folder: Path) -> int:
    """Put an empty file in place of a segment's engine into the cache, and remove the segment's weights, as a build does.
    Return the planned bytes of the engine."""
    (entry,) = (each for each in graphs.manifest.segments if each["name"] == name)
    target = tensorrt._target(made)
    (segment,) = tensorrt._segment(made, graphs, entry, target, folder)
    (folder / "engine").touch()
    EngineCache().keep(segment.made_from, folder / "engine", {})
    segment.graph.with_suffix(".bin").unlink()
    return made.needs.engine_files[name]


def test_engines_in_the_cache_need_no_space_again_and_removed_weights_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, needed = tmp_path / "cache", []
    monkeypatch.setenv("CANVASRT_CACHE", str(library.empty_cache(cache)))
    monkeypatch.setattr(plans, "KEPT_GRAPHS", 0)
    monkeypatch.setattr(checks, "check_disk", lambda folders: needed.append(folders[cache]))
    (made,) = plan_all("demo", [find_target("rtx-4090")], tmp_path / "out", BuildOptions("int4"))
    other = replace(made, max_batch=2)
    graphs = graphs_of(made)
    checks.check_space([made])
    assert needed.pop() == made.disk - made.needs.graphs
    engine = stand_in(made, graphs, "body_0", tmp_path)
    checks.check_space([made])
    assert needed.pop() == pytest.approx(made.needs.engines - engine, rel=0.02)
    # A build of other engines needs the removed weights, so it writes all graphs again.
    assert not reusable_graphs([other])
    assert not reusable_graphs([made, other])
    checks.check_space([other])
    assert 0.9 * other.disk < needed.pop() <= other.disk
    for name in ("head", "vision"):
        stand_in(made, graphs, name, tmp_path)
    checks.check_space([made])
    assert needed.pop() == 0
