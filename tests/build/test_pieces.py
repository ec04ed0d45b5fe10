"""Real builds of engines in pieces: TensorRT-RTX builds the pieces, and Triton (the language) compiles the kernels
between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from canvasrt.build.options import BuildOptions
from canvasrt.bundle import Bundle, Manifest, load_bundle
from canvasrt.engine_profiles import passes_of
from canvasrt.errors import CanvasError
from canvasrt.export.quantize.calibrate import Calibration
from canvasrt.export.quantize.quantize import quantize_graphs
from canvasrt.pipeline import plan_all
from canvasrt.recipes.recipe import load_recipe
from canvasrt.roofline.cost import ROW_ROUNDING, ROW_SORT, SORTED_PRODUCT, is_own
from canvasrt.roofline.group import EXPERTS, ROUTING
from canvasrt.roofline.predict import Predictor
from canvasrt.roofline.rates import find_gpu
from canvasrt.sorted_rows.description import SortedSegment
from canvasrt.targets import parse_targets
from tests.conftest import Command
from tests.helpers.quantized import SHAPE

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
pytest.importorskip("triton", reason="needs canvasrt[sorted]")

OPTIONS = ("--max-context", "1024", "--max-batch", "2", "--experts", "sorted")
EXPERTS_SIZES = ("hidden_size", "moe_intermediate_size", "num_experts", "top_k_experts")
D, F, E, K = (SHAPE[name] for name in EXPERTS_SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


def build(
    command: Command, graphs: Path, target: str, out: Path, *options: str
) -> tuple[Bundle, str]:
    """Build in a child process, where Triton compiles instead of interpreting. Return the bundle and the messages."""
    line = ("build", graphs, "-t", target, "-o", out, *OPTIONS, *options)
    done = command(*line, env={"CANVASRT_CACHE": str(out.parent / "cache")})
    assert done.returncode == 0, done.stderr
    return load_bundle(out, "engines", check=True), done.stderr


@pytest.fixture(scope="module")
def bundle(plain_graphs: Bundle, folder: Path, command: Command) -> Bundle:
    return build(command, plain_graphs.path, "rtx", folder / "rtx", "--precision", "bf16")[0]


def test_a_bundle_has_pieces_weights_and_kernels_for_each_gpu(bundle: Bundle) -> None:
    kernels = {
        f"{name}.sm{capability}.cubin"
        for name in ("sort_rows-bfloat16", "gate_up-bfloat16", "down-bfloat16")
        for capability in (86, 89, 120)
    }
    assert set(bundle.manifest.files) == kernels | {
        *("body_0.sorted.json", "body_0.0.engine", "body_0.1.engine", "body_0.2.engine"),
        *("body_0.experts.bin", "body_0.kernels.json.gz", "embedding.bin", "head.engine"),
        *("head.kernels.json.gz", "host_head.bin"),
    }
    body = bundle.manifest.segments[0]
    assert (body["file"], body["layers"]) == ("body_0.sorted.json", [0, 1])
    assert not {"capacity", "gate_rows", "gate_queues"} & set(body["profiles"][1])
    assert bundle.manifest.options["experts"] == "sorted"
    earlier = {name: value for name, value in bundle.manifest.data.items() if name != "passes"}
    assert passes_of(Manifest(earlier)) == passes_of(bundle.manifest)
    assert "triton" in bundle.manifest.made_by
    segment = SortedSegment.read(bundle.file(body["file"]))
    for file, sha256 in segment.pieces:
        assert bundle.manifest.files[file]["sha256"] == sha256
    for images in segment.kernels.values():
        assert set(images) == {"8.6", "8.9", "12.0"}
        assert all(image.file in kernels for image in images.values())


def test_the_experts_weights_are_in_no_engine(bundle: Bundle) -> None:
    each_layer = 2 * 3 * E * F * D
    held = bundle.manifest.files["body_0.experts.bin"]["bytes"]
    assert 2 * each_layer <= held < 2 * each_layer + 4 * 4096


def test_a_second_build_takes_the_pieces_from_the_cache(
    bundle: Bundle, plain_graphs: Bundle, command: Command
) -> None:
    again = bundle.path.with_name("again")
    made, said = build(command, plain_graphs.path, "rtx", again, "--precision", "bf16")
    assert "reusing body_0.1 for rtx" in said
    assert "building body" not in said
    assert made.manifest == bundle.manifest


def test_kernels_are_predicted_with_ours_among_them(bundle: Bundle) -> None:
    rows = Predictor(bundle).denoise(find_gpu("rtx-4090"), 1, 512).rows
    for layer in (0, 1):
        ours = [row for row in rows if row.kernel.kind in (SORTED_PRODUCT, ROW_SORT)]
        first, *products = [row for row in ours if row.place.layer == layer]
        assert first.place.part == ROUTING
        assert [row.place.part for row in products] == [EXPERTS] * 2
        assert {row.cost.format for row in products} == {"bf16"}
    gate_up = products[0].cost
    assert gate_up.operations == 2 * (256 * K + 8 * E) * D * 2 * F
    weights = 2 * E * 2 * F * D
    # Empty rows of a block take part in the product, but are neither read nor written.
    assert gate_up.moved == weights + 2 * 256 * K * (D + F)
    assert {row.place.layer for row in rows if row.place.part == "attention"} == {0, 1}


def test_nvfp4_experts(plain_graphs: Bundle, folder: Path, command: Command) -> None:
    """A further kernel rounds the tokens, so tensor cores multiply codes directly."""
    small, out = folder / "graphs-nvfp4", folder / "nvfp4"
    recipe = load_recipe("nvfp4")
    amax = dict.fromkeys(recipe.formats(plain_graphs.manifest.model), 6.0)
    quantize_graphs(plain_graphs.path, small, recipe, calibration=Calibration(amax=amax))
    made, _ = build(command, small, "rtx-pro-6000", out)
    rows = Predictor(made).denoise(find_gpu("rtx-pro-6000"), 1, 512).rows
    ours = [row for row in rows if is_own(row.kernel) and row.place.layer == 1]
    assert [row.kernel.kind for row in ours] == [ROW_SORT, ROW_ROUNDING, *2 * [SORTED_PRODUCT]]
    assert [row.place.part for row in ours] == [ROUTING, *3 * [EXPERTS]]
    _, rounding, gate_up, down = (row.cost for row in ours)
    assert {gate_up.format, down.format} == {"fp4"}
    assert rounding.moved == 256 * D * (2 + 9 / 16)
    weights = E * 2 * F * (D * 9 / 16 + 4)
    assert gate_up.moved == weights + 256 * K * (D + F) * 9 / 16


def test_inspect_says_which_kernels_are_ours(bundle: Bundle, command: Command) -> None:
    line = ("inspect", bundle.path, "--kernels", "--context", 512)
    done = command(*line, "--json")
    assert done.returncode == 0, done.stderr
    each = json.loads(done.stdout)["passes"]["denoise"]["each"]
    assert sum(row["ours"] for row in each) == 6
    text = command(*line, "--batch", 2).stdout
    for words in (
        "batch 2 in passes of 2",
        "6 of them are canvasrt's own",
        "rows sorted by expert",
    ):
        assert words in text
    done = command(*line, "--capacity", 64)
    assert done.returncode == 2
    assert "--capacity has no effect: the bundle's experts have sorted rows" in done.stderr


def test_a_plan_counts_rows_in_place_of_slots() -> None:
    """With slots, a pass writes [experts, slots, width]. With sorted rows, it writes one row per token and chosen
    expert."""
    target = parse_targets("rtx-4090")
    ours, slots = (
        plan_all("demo", target, "out", BuildOptions("int4", 4096, experts=each), check=False)[0]
        for each in ("sorted", "slots")
    )
    assert ours.memory.weights == slots.memory.weights
    assert ours.memory.kv_cache == slots.memory.kv_cache
    assert ours.memory.buffers > slots.memory.buffers
    assert ours.memory.workspace <= slots.memory.workspace


def test_a_missing_compiler_is_refused_before_anything_is_written(
    plain_graphs: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    made = BuildOptions("bf16", max_context=1024, max_batch=1, experts="sorted")
    with pytest.raises(CanvasError, match="triton is not installed"):
        plan_all(plain_graphs.path, parse_targets("rtx-4090"), "out", made)
