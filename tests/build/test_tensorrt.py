"""Real TensorRT-RTX engines, built from a small random checkpoint with the released model's head sizes."""

from __future__ import annotations

import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canvasrt.build import compile
from canvasrt.build import plan as planning
from canvasrt.build.options import BuildOptions
from canvasrt.build.profile_ranges import Profile, profiles, to_json
from canvasrt.bundle import Bundle, Manifest, load_bundle
from canvasrt.engine_profiles import passes_of
from canvasrt.errors import CanvasError
from canvasrt.machine import Gpu
from canvasrt.pass_shapes import plan_passes
from canvasrt.pipeline import build_all, build_bundle, plan_all
from canvasrt.progress import listening
from canvasrt.targets import parse_targets
from tests.conftest import Command
from tests.helpers import library

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")

TARGETS = {"rtx": "8.6, 8.9, 12.0", "rtx-4090": "8.9"}
OPTIONS = {"max_context": 1024, "max_batch": 2}

Built = Callable[..., tuple[Bundle, list[str]]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library.empty_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def built(
    plain_graphs: Bundle, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Built:
    """Return a function that builds engines from the small graphs and returns the bundle and the progress messages."""

    def make(target: str, name: str = "engines", kept: Path = cache) -> tuple[Bundle, list[str]]:
        monkeypatch.setenv("CANVASRT_CACHE", str(kept))
        said: list[str] = []
        with listening(lambda what, *_: said.append(what)):
            bundle = build_bundle(
                plain_graphs.path, target, tmp_path / name, BuildOptions(**OPTIONS)
            )
        return bundle, list(dict.fromkeys(said))

    return make


@pytest.mark.parametrize("target", TARGETS)
def test_targets_of_one_and_of_several_gpus_are_built(
    target: str, built: Built, plain_graphs: Bundle
) -> None:
    bundle, said = built(target)
    manifest = load_bundle(bundle.path, kind="engines", check=True).manifest
    assert manifest.target is not None
    assert {name: manifest.target[name] for name in ("name", "backend", "compute_capability")} == {
        "name": target,
        "backend": "tensorrt-rtx",
        "compute_capability": TARGETS[target],
    }
    assert manifest.target["builder_version"] == manifest.made_by["tensorrt-rtx"]
    assert manifest.options["precision"] == "bf16"
    engines = {"body_0.engine", "head.engine"}
    lists = {"body_0.kernels.json.gz", "head.kernels.json.gz"}
    assert set(manifest.files) == engines | lists | {"embedding.bin", "host_head.bin"}
    assert {each["kernels"] for each in manifest.segments} == lists
    assert manifest.files["embedding.bin"] == plain_graphs.manifest.files["embedding.bin"]
    passes = plan_passes(manifest.model, **OPTIONS)
    assert passes_of(manifest) == passes
    # Manifests of earlier versions have no `passes`.
    earlier = {name: value for name, value in manifest.data.items() if name != "passes"}
    assert passes_of(Manifest(earlier)) == passes
    body, head = manifest.segments
    assert (body["file"], body["layers"]) == ("body_0.engine", [0, 1])
    for each in (body, head):
        assert each["profiles"] == to_json(profiles(each, manifest.model, passes))
    assert body["activation_bytes"] > head["activation_bytes"] > 0
    weights = plain_graphs.manifest.files["body_0.bin"]["bytes"]
    assert manifest.files["body_0.engine"]["bytes"] > weights
    built_now = [line for line in said if line.startswith("building")]
    assert sorted(built_now) == [f"building {name} for {target}" for name in ("body_0", "head")]


def test_a_build_into_another_folder_takes_the_engines_from_the_cache(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = built("rtx-4090", "first")
    second, said = built("rtx-4090", "second")
    assert "reusing body_0 for rtx-4090" in said
    assert not any("building" in line for line in said)
    assert second.manifest == first.manifest
    assert second.file("head.engine").samefile(first.file("head.engine"))
    assert second.file("head.kernels.json.gz").samefile(first.file("head.kernels.json.gz"))
    again, said = built("rtx-4090", "second")
    assert again.manifest == second.manifest
    assert not any("reusing" in line for line in said)
    monkeypatch.setattr("canvasrt.extras.version", lambda name: "99.0")
    with pytest.raises(CanvasError, match=r"by tensorrt-rtx [\d.]+, but 99\.0 is installed now"):
        built("rtx-4090", "second")


def test_several_targets_share_an_export(
    built: Built, plain_graphs: Bundle, tmp_path: Path, command: Command
) -> None:
    """The export yields the same bytes as the fixture's, so the engines built before are reused."""
    for target in TARGETS:
        built(target, target)
    checkpoint, out = library.checkpoint("small"), tmp_path / "out"
    said: list[str] = []
    plans = plan_all(
        checkpoint, parse_targets(",".join(TARGETS)), out, BuildOptions("bf16", **OPTIONS)
    )
    with listening(lambda what, *_: said.append(what)):
        made = build_all(plans)
    assert [plan.precision.name for plan, _ in made] == ["bf16", "bf16"]
    assert [line for line in dict.fromkeys(said) if not line.startswith("checking")] == [
        "exporting graphs (bf16)",
        *(f"reusing {name} for {target}" for target in TARGETS for name in ("body_0", "head")),
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted(TARGETS)
    shown = command("inspect", out / "rtx-4090").stdout
    assert "compute_capability 8.9" in shown
    assert "denoise_batch  batch 2" in shown


def without_tensorrt(job: compile.Job, children: compile.Children) -> int | None:
    """Replaces TensorRT's builder, which takes long."""
    job.engine.write_bytes(f"engine of {job.graph.stem}".encode())
    job.kernels.write_bytes(b"kernels")
    return 10**6


def test_large_graphs_go_as_their_engines_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment's graph is removed once its engine is built. A second build reuses the engines; if an engine is
    missing, its graph is exported again."""
    monkeypatch.setenv("CANVASRT_CACHE", str(library.empty_cache(tmp_path / "cache")))
    monkeypatch.setattr(planning, "KEPT_GRAPHS", 0)
    monkeypatch.setattr("canvasrt.build.compile.compile_graph", without_tensorrt)
    checkpoint, said = library.checkpoint("small"), list[str]()

    def build(out: str, **options: Any) -> Bundle:
        said.clear()
        with listening(lambda what, *_: said.append(what)):
            chosen = BuildOptions("int4", **OPTIONS, **options)
            return build_bundle(checkpoint, "rtx-4090", tmp_path / out, chosen)

    first = build("first")
    (graphs,) = (tmp_path / "cache" / "graphs").iterdir()
    assert not list(graphs.glob("body_*.bin"))
    assert (graphs / "embedding.bin").exists()
    assert build("second").manifest == first.manifest
    assert not any(line.startswith(("quantizing", "building")) for line in said)
    shutil.rmtree(tmp_path / "cache" / "engines")
    assert build("third", keep_graphs=True).manifest == first.manifest
    assert {"quantizing", "building body_0 for rtx-4090"} <= set(said)
    assert list(graphs.glob("body_*.bin"))
    build("fourth")  # finds all engines in the cache
    assert not list(graphs.glob("body_*.bin"))


def test_a_second_build_at_once_leaves_the_first_one_s_graphs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second build is for another GPU, so it needs weights that the first has removed. It exports to a new
    folder."""
    monkeypatch.setenv("CANVASRT_CACHE", str(library.empty_cache(tmp_path / "cache")))
    monkeypatch.setattr(planning, "KEPT_GRAPHS", 0)
    monkeypatch.setattr("canvasrt.build.tensorrt.available_bytes", lambda: 10**9)  # one by one
    checkpoint, options = library.checkpoint("small"), BuildOptions("int4", **OPTIONS)
    made: list[Bundle] = []

    def build(target: str) -> None:
        made.append(build_bundle(checkpoint, target, tmp_path / target, options))

    second = threading.Thread(target=build, args=("rtx-5090",))

    def compiled(job: compile.Job, children: compile.Children) -> int | None:
        if job.graph.stem == "head" and not second.ident:
            before = job.graph.stat().st_ino
            second.start()
            second.join(3)
            assert job.graph.stat().st_ino == before
        return without_tensorrt(job, children)

    monkeypatch.setattr("canvasrt.build.compile.compile_graph", compiled)
    build("rtx-4090")
    second.join()
    targets = [(each.manifest.target or {})["name"] for each in made]
    assert targets == ["rtx-4090", "rtx-5090"]


def test_tensorrt_s_engines_are_for_the_kind_of_gpu_on_which_they_were_built(
    plain_graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right GPU is chosen even if it is not CUDA's first."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tensorrt", sys.modules["tensorrt_rtx"])
    jobs: list[compile.Job] = []

    def compiled(job: compile.Job, children: compile.Children) -> int | None:
        jobs.append(job)
        return without_tensorrt(job, children)

    monkeypatch.setattr("canvasrt.build.compile.compile_graph", compiled)
    for number, name in enumerate(("NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA H200")):
        here = [Gpu("NVIDIA A100", 80 * 10**9, (8, 0), "580", "GPU-a")]
        here.append(Gpu(name, 80 * 10**9, (9, 0), "580", f"GPU-{name}"))
        monkeypatch.setattr("canvasrt.machine._listed", lambda here=here: tuple(here))
        build_bundle(plain_graphs.path, "h100", tmp_path / f"{number}", BuildOptions(**OPTIONS))
    assert [each.gpu for each in jobs] == ["GPU-NVIDIA H100 PCIe"] * 2 + ["GPU-NVIDIA H200"] * 2
    assert len({each.timing for each in jobs}) == 2


@pytest.mark.parametrize("damaged", [True, False])
def test_timings_that_tensorrt_refuses_are_recorded_anew(tmp_path: Path, damaged: bool) -> None:
    """TensorRT refuses timings of another kind of GPU. For damaged timings, `create_timing_cache` returns None."""
    (file := tmp_path / "timings").write_bytes(b"old")

    class Config:
        used: bytes | None = None

        def create_timing_cache(self, content: bytes) -> bytes | None:
            return None if damaged and content else content

        def set_timing_cache(self, timings: bytes, ignore_mismatch: bool) -> bool:
            self.used = None if timings else timings
            return self.used is not None

    compile._use_timings(config := Config(), file)
    assert config.used == b""


@pytest.mark.parametrize("name", ["head.engine", "head.kernels.json.gz"])
def test_a_damaged_file_in_the_cache_is_built_again(
    name: str, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.build.compile.compile_graph", without_tensorrt)
    own = tmp_path / "own"
    first, _ = built("rtx-4090", "first", own)
    file = first.file(name)
    content = file.read_bytes()
    # This also changes the file in the cache, which is the same file by a hard link.
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    _, said = built("rtx-4090", "second", own)
    assert "reusing body_0 for rtx-4090" in said
    assert "building head for rtx-4090" in said


def test_a_builder_that_takes_more_memory_than_planned_is_found_out(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder reports the memory that all pieces of attention would need at the same time."""

    def greedy(job: compile.Job, children: compile.Children) -> int | None:
        made = without_tensorrt(job, children)
        return 25 * 10**9 if job.graph.stem == "body_0" else made

    monkeypatch.setattr("canvasrt.build.compile.compile_graph", greedy)
    with pytest.raises(CanvasError, match=r"body_0 needs 25\.0 GB .*rtx-4090 has 24\.0"):
        built("rtx-4090", "engines", tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own"]


def test_an_interrupted_build_goes_on_where_it_was(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"

    def interrupted(job: compile.Job, children: compile.Children) -> int | None:
        if job.graph.stem == "head":
            raise KeyboardInterrupt
        return without_tensorrt(job, children)

    monkeypatch.setattr("canvasrt.build.compile.compile_graph", without_tensorrt)
    with monkeypatch.context() as patch:
        patch.setattr("canvasrt.build.compile.compile_graph", interrupted)
        patch.setattr("canvasrt.build.tensorrt.available_bytes", lambda: 10**9)  # one by one
        with pytest.raises(KeyboardInterrupt):
            built("rtx-4090", "engines", own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own"]
    _, said = built("rtx-4090", "engines", own)
    assert [line for line in said if "for rtx-4090" in line] == [
        "reusing body_0 for rtx-4090",
        "building head for rtx-4090",
    ]


def job(graph: Path, sizes: Profile | None = None) -> compile.Job:
    profiles = {"all": sizes or {}}
    return compile.Job("tensorrt_rtx", graph, graph.with_suffix(".engine"), ((12, 0),), profiles)


def test_tensorrt_s_own_reason_is_the_error(plain_graphs: Bundle, tmp_path: Path) -> None:
    """The graph's file exists, but the file of its weights does not."""
    graph = tmp_path / "head.onnx"
    graph.write_bytes(plain_graphs.file("head.onnx").read_bytes())
    with pytest.raises(
        CanvasError, match=r"head: .* failed to build an engine: .*Failed to open.*\.bin"
    ):
        compile.compile_graph(job(graph))
    assert [path.name for path in tmp_path.iterdir()] == ["head.onnx"]


def test_a_graph_with_unknown_dimensions_is_refused(plain_graphs: Bundle) -> None:
    with pytest.raises(CanvasError, match="input hidden has an unknown dimension batch"):
        compile.compile_graph(job(plain_graphs.file("head.onnx")))


def test_a_builder_that_is_killed_is_an_error_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder process kills itself, as if the kernel had killed it for want of memory."""
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(killed.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("sys.executable", str(killed))
    with pytest.raises(
        CanvasError, match="head: the tensorrt_rtx builder was killed by signal 9"
    ) as raised:
        compile.compile_graph(job(tmp_path / "head.onnx"))
    assert "memory" in raised.value.hint


def test_a_cache_that_cannot_be_written_is_said_before_the_build(
    built: Built, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CanvasError, match=r"the cache .* cannot be used") as raised:
        built("rtx-4090", "engines", tmp_path / "file")
    assert "CANVASRT_CACHE" in raised.value.hint
