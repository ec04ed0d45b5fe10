"""Serving profiles: which a package offers, which run on a GPU, and engines built at the first start."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.containers.package.package import package
from canvasrt.containers.serve import prepare as preparing
from canvasrt.containers.serve.build_engines import EngineBuild, Wait
from canvasrt.containers.serve.prepare import engines_folder, prepare
from canvasrt.containers.serve.serving_profiles import ServingProfile, choose_profile, profiles_of
from canvasrt.errors import CanvasError
from canvasrt.machine import Gpu
from canvasrt.recipes.recipe import Recipe, load_recipe
from canvasrt.targets import find_target
from tests.conftest import Command
from tests.helpers.memory import estimate

GB = 10**9
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", 34 * GB, (12, 0), "580.1")
RTX_PRO = Gpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 102 * GB, (12, 0), "580.1")
H100 = Gpu("NVIDIA H100 80GB HBM3", 85 * GB, (9, 0), "580.1")
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 25 * GB, (8, 9), "580.1")
RTX_3090 = Gpu("NVIDIA GeForce RTX 3090", 25 * GB, (8, 6), "580.1")


@pytest.fixture(autouse=True)
def _builders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that every builder is installed and that this is an x86-64 machine without a GPU."""
    monkeypatch.setattr("canvasrt.machine._asked", lambda: ("", ""))
    monkeypatch.setattr("canvasrt.extras.is_installed", lambda module: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def make(
    folder: Path,
    like: Bundle,
    target: str | None,
    precision: str = "bf16",
    recipe: Recipe | None = None,
    **more: int,
) -> Path:
    """Write a bundle whose manifest names a target. It cannot run."""
    quantized = recipe.formats(like.manifest.model) if recipe else {}
    options = {"precision": precision, "max_context": 4096, "max_batch": 4, **more}
    if recipe:
        options |= {"precision": recipe.precision, "recipe": recipe.to_json()}
    folder.mkdir(parents=True)
    (folder / "head.onnx").write_bytes(target.encode() if target else b"graphs")
    write_manifest(
        folder,
        kind="engines" if target else "graphs",
        made_from={},
        options=options,
        model=like.manifest.model,
        sampler=like.manifest.sampler,
        segments=[
            {
                "name": "head",
                "file": "head.onnx",
                "quantized": {name: choice.format for name, choice in quantized.items()},
            }
        ],
        embedding=None,
        tokenizer=None,
        target={"name": target, "backend": "any"} if target else None,
    )
    return folder


@pytest.fixture
def several(tmp_path: Path, engines: Bundle) -> Bundle:
    """A package with engines for four targets, and with graphs for targets whose engines are built on the serving
    machine."""
    folder = tmp_path / "package"
    for target in ("rtx-5090", "rtx-pro-6000", "dgx-spark", "cpu"):
        make(folder / "engines" / target, engines, target, "nvfp4" if target != "cpu" else "fp32")
    make(folder / "engines" / "graphs", engines, None, "fp8")
    write_manifest(
        folder,
        kind="package",
        made_from={},
        options={},
        model=engines.manifest.model,
        sampler=engines.manifest.sampler,
        segments=[],
        embedding=None,
        tokenizer=None,
    )
    return load_bundle(folder)


def test_an_id_is_the_hash_of_the_tags(engines: Bundle, packaged: Bundle):
    (profile,) = profiles_of(engines)
    text = json.dumps(profile.tags, sort_keys=True, separators=(",", ":"))
    assert profile.id == hashlib.sha256(text.encode()).hexdigest()
    assert profile.name == "onnxruntime-fp32-tp1-pp1"
    assert profile.path == engines.path
    (inside,) = profiles_of(packaged)
    assert (inside.path, inside.id) == (packaged.path / "engines", profile.id)


def test_a_package_of_several_targets_has_a_profile_each(several: Bundle):
    found = {profile.target.name: profile for profile in profiles_of(several)}
    assert {"rtx-5090", "rtx-pro-6000", "dgx-spark", "cpu", "h100", "b200"} <= set(found)
    assert len({profile.id for profile in found.values()}) == len(found)
    assert found["h100"].name == "tensorrt-fp8-tp1-pp1"
    assert found["h100"].builds
    assert not found["rtx-5090"].builds
    assert found["rtx-5090"].name == "tensorrt_rtx-nvfp4-tp1-pp1"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], "cpu"),
        ([RTX_4090], "cpu"),  # no engines for its architecture
        ([RTX_5090], "rtx-5090"),
        ([RTX_PRO], "rtx-pro-6000"),
        ([H100], "h100"),
    ],
)
def test_the_gpu_decides(several: Bundle, gpus: list[Gpu], expected: str):
    assert choose_profile(several, gpus=gpus).target.name == expected


def test_the_gpu_that_serves_is_one_that_the_engines_are_for(several: Bundle):
    """The GPU is chosen by its name, not by its number or by CUDA's order."""
    there = [
        replace(each, uuid=f"GPU-{number}")
        for number, each in enumerate((RTX_4090, RTX_PRO, RTX_5090, H100, RTX_5090))
    ]
    profile = choose_profile(several, "rtx-5090", gpus=there)
    assert [gpu.uuid for gpu in profile.gpus(there)] == ["GPU-2", "GPU-4", "GPU-1"]
    assert profile.gpus([RTX_4090, H100]) == []
    small = replace(RTX_5090, memory=10**6)
    assert profile.gpus([small, RTX_PRO]) == [RTX_PRO]


def test_one_package_serves_all_consumer_cards(several: Bundle, engines: Bundle):
    make(several.path / "engines" / "rtx", engines, "rtx", "int4")
    for gpu in (RTX_3090, RTX_4090):
        assert choose_profile(several, gpus=[gpu]).target.name == "rtx"
    # Engines for this GPU alone are preferred to engines that also run on others.
    assert choose_profile(several, gpus=[RTX_5090]).target.name == "rtx-5090"
    (profile,) = (each for each in profiles_of(several) if each.target.name == "rtx")
    assert profile.misfit([H100]).startswith("needs compute capability 8.6, 8.9, 12.0;")
    assert not profile.misfit([RTX_5090])


def test_a_profile_counts_the_passes_that_its_engines_take(tmp_path: Path, engines: Bundle):
    usual = make(tmp_path / "usual", engines, "rtx-4080", "int4")
    canvas = engines.manifest.model.canvas_length
    short = make(tmp_path / "short", engines, "rtx-4080", "int4", prefill_chunk=canvas)
    most, least = (profiles_of(load_bundle(each))[0].memory for each in (usual, short))
    assert most is not None
    assert least is not None
    assert least < most


def test_recipes_of_one_target_are_told_apart(tmp_path: Path, engines: Bundle):
    wide = load_recipe("nvfp4-mixed")
    narrow = replace(wide, name="narrow cache", kv_cache="fp8")
    found = {}
    for number, recipe in enumerate((load_recipe("nvfp4"), wide, narrow)):
        folder = make(tmp_path / str(number), engines, "rtx-5090", recipe=recipe)
        (found[recipe.name],) = profiles_of(load_bundle(folder))
    assert len({profile.id for profile in found.values()}) == 3
    assert {name: profile.name for name, profile in found.items()} == {
        "nvfp4": "tensorrt_rtx-nvfp4-tp1-pp1",
        "nvfp4-mixed": "tensorrt_rtx-nvfp4-mixed-tp1-pp1",
        "narrow cache": "tensorrt_rtx-narrow-cache-tp1-pp1",
    }
    assert found["nvfp4"].tags["precision"] == found["nvfp4-mixed"].tags["precision"] == "nvfp4"
    assert found["nvfp4-mixed"].tags["recipe"] == "nvfp4-mixed"


def test_memory_is_that_of_the_recipe(tmp_path: Path, engines: Bundle):
    """The estimate uses the recipe's format of every weight, and its FP8 cache of one byte per number."""
    model = engines.manifest.model
    taken = {}
    for name in ("nvfp4", "nvfp4-experts"):
        for cache in (None, "fp8"):
            recipe = replace(load_recipe(name), kv_cache=cache)
            folder = make(tmp_path / f"{name}-{cache}", engines, "rtx-5090", recipe=recipe)
            (profile,) = profiles_of(load_bundle(folder))
            taken[name, cache] = profile.memory
            formats = {name: each.format for name, each in recipe.formats(model).items()}
            need = estimate(model, "nvfp4", 4096, 4, formats=formats, kv_cache=cache)
            assert profile.memory == need.total
    assert taken["nvfp4-experts", None] > taken["nvfp4", None] > taken["nvfp4", "fp8"]


def test_a_profile_can_be_requested(several: Bundle):
    wanted = next(each for each in profiles_of(several) if each.target.name == "cpu")
    for name in (wanted.id, wanted.name, "cpu"):
        assert choose_profile(several, name, gpus=[RTX_5090]) == wanted
    with pytest.raises(CanvasError, match="unknown serving profile 'x'") as caught:
        choose_profile(several, "x", gpus=[])
    assert wanted.id in caught.value.hint


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ([], "reports no GPU"),
        (
            [RTX_4090],
            r"needs compute capability 12.0; this machine has NVIDIA GeForce RTX 4090 \(8.9\)",
        ),
        ([replace(RTX_5090, memory=GB // 10**6)], r"needs \S+ GB; the GPU has 0.0 GB"),
        ([replace(RTX_5090, driver="575.51")], r"needs a driver of 580 or newer; this .* 575.51"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, engines: Bundle, gpus: list[Gpu], says: str
):
    bundle = load_bundle(make(tmp_path / "a", engines, "rtx-5090"))
    with pytest.raises(CanvasError, match=says) as caught:
        choose_profile(bundle, gpus=gpus)
    assert "canvasrt targets" in caught.value.hint


def test_another_architecture_is_refused(tmp_path: Path, engines: Bundle):
    spark = load_bundle(make(tmp_path / "a", engines, "dgx-spark"))
    here = Gpu("NVIDIA GB10", 128 * GB, (12, 1), "580.1")
    with pytest.raises(CanvasError, match="needs an aarch64 host; this one is x86_64"):
        choose_profile(spark, gpus=[here])


def test_a_package_whose_engines_are_not_mounted_says_so(tmp_path: Path, several: Bundle):
    empty = Bundle(tmp_path / "nothing", several.manifest)
    with pytest.raises(CanvasError, match="holds no engines") as caught:
        profiles_of(empty)
    assert str(tmp_path / "nothing" / "engines") in caught.value.hint


def test_graphs_are_built_once_into_the_cache(
    graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reports: list[str] = []
    (profile,) = profiles_of(graphs)
    assert profile.builds
    wait = Wait(notify=reports.append)
    out = prepare(profile, tmp_path, wait)
    assert out == engines_folder(profile, tmp_path)
    assert out is not None
    assert out.is_relative_to(tmp_path)
    built = load_bundle(out, kind="engines")
    assert built.manifest.target
    assert built.manifest.target["name"] == "cpu"
    assert "" in reports
    assert any("Now: " in detail for detail in reports)
    # The second call builds nothing, so it needs no builder.
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert prepare(profile, tmp_path, wait) == out


def test_a_build_that_fails_says_why(graphs: Bundle, tmp_path: Path):
    (profile,) = profiles_of(graphs)
    wrong = replace(profile, max_context=10**9)
    with pytest.raises(CanvasError, match="--max-context 1000000000") as caught:
        prepare(wrong, tmp_path, Wait())
    assert caught.value.hint.startswith("give at most")
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_build_that_crashes_is_no_crash_of_the_server(
    graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (profile,) = profiles_of(graphs)
    crash = [sys.executable, "-c", "import os; print('{not json'); os.abort()"]
    monkeypatch.setattr(EngineBuild, "command", lambda job: crash)
    with pytest.raises(CanvasError, match="exit code -6") as caught:
        prepare(profile, tmp_path, Wait())
    assert caught.value.hint == "see the build's output in the log"


def test_a_build_can_be_interrupted(graphs: Bundle, tmp_path: Path):
    (profile,) = profiles_of(graphs)
    stop = threading.Event()

    def notify(detail: str) -> None:
        stop.set()

    assert prepare(profile, tmp_path, Wait(stop, notify)) is None
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_cache_that_cannot_be_written_to_is_refused(graphs: Bundle, tmp_path: Path):
    (profile,) = profiles_of(graphs)
    (tmp_path / "file").touch()
    with pytest.raises(CanvasError, match="cannot be written to") as caught:
        prepare(profile, tmp_path / "file", Wait())
    assert "NIM_CACHE_PATH" in caught.value.hint


def test_what_a_read_only_cache_has_is_served(graphs: Bundle, tmp_path: Path):
    (profile,) = profiles_of(graphs)
    out = engines_folder(profile, tmp_path)
    make(out, graphs, "cpu")
    out.with_name(f"{out.name}.lock").mkdir()  # unwritable even for root
    assert prepare(profile, tmp_path, Wait()) == out


def test_two_servers_build_once(graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (profile,) = profiles_of(graphs)
    real, built = preparing._build, []

    def counted(*arguments: Any) -> None:
        built.append(arguments)
        real(*arguments)

    monkeypatch.setattr(preparing, "_build", counted)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: prepare(profile, tmp_path, Wait()), range(2)))
    assert found == [engines_folder(profile, tmp_path)] * 2
    assert len(built) == 1


def test_other_graphs_and_gpus_have_folders_of_their_own(
    engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    profile = ServingProfile(
        find_target("h100"), "fp8", 4096, 4, engines.path, "a" * 64, None, True
    )
    other = replace(profile, digest="b" * 64)
    assert engines_folder(profile, Path("/c")) != engines_folder(other, Path("/c"))
    assert engines_folder(profile, Path("/c")).parent.name == profile.id
    # TensorRT's engines run only on the kind of GPU on which they were built.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = set()
    for gpu in (H100, replace(H100, name="NVIDIA H100 PCIe")):
        monkeypatch.setattr("canvasrt.machine._listed", lambda gpu=gpu: (gpu,))
        found.add(engines_folder(profile, Path("/c")))
    assert len(found) == 2


def test_nims_commands(command: Command, graphs: Bundle, tmp_path: Path):
    package(graphs.path, tmp_path / "package")
    environment = {
        "NIM_MODEL_PATH": str(tmp_path / "package"),
        "NIM_CACHE_PATH": str(tmp_path / "c"),
    }
    shown = command("list-model-profiles", env=environment).stdout
    data = json.loads(command("list-model-profiles", "--json", env=environment).stdout)
    (row,) = data["profiles"]
    assert row["compatible"]
    assert f"{row['id']} (onnxruntime-fp32-tp1-pp1) for cpu, built at the first start" in shown
    filled = command("download-to-cache", "--profile", row["id"], env=environment).stdout
    folder = Path(filled.split()[-1])
    assert load_bundle(folder, kind="engines")
    store = tmp_path / "store"
    done = command("create-model-store", "-m", store, env=environment)
    assert done.returncode == 0, done.stderr
    assert load_bundle(store, kind="engines").manifest.digest == load_bundle(folder).manifest.digest
    again = json.loads(command("list-model-profiles", store, "--json").stdout)["profiles"]
    assert [each["id"] for each in again] == [row["id"]]
    assert not again[0]["builds"]
    done = command("download-to-cache", "--profile", "x", env=environment)
    assert done.returncode == 1
    assert "unknown serving profile 'x'" in done.stderr
