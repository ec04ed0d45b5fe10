"""Real builds for RTX targets: the demo checkpoint for every target, and a random checkpoint in several precisions.

The random checkpoint has the released model's head sizes, experts and vocabulary and one layer of each kind; its other
sizes are small. Targets of the same capability share engines through the cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from canvasrt.build.options import BuildOptions, parse_precision
from canvasrt.bundle import load_bundle
from canvasrt.pipeline import build_all, graphs_of, plan_all
from canvasrt.progress import listening
from canvasrt.targets import find_target, parse_targets
from tests.conftest import Command

pytestmark = pytest.mark.acceptance

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")

TARGETS = {
    "cpu": "fp32",
    "rtx": "int4",
    "rtx-4090": "int4",
    "rtx-5090": "nvfp4",
    "rtx-pro-6000": "nvfp4",
    "dgx-spark": "nvfp4",
}


@pytest.fixture(scope="module")
def demo(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the demo checkpoint for all targets with one command."""
    out = tmp_path_factory.mktemp("demo") / "all"
    done = command("build", "demo", "--target", ",".join(TARGETS), "-o", out, timeout=600)
    assert done.returncode == 0, done.stderr
    return out


def test_one_command_builds_each_target_at_its_first_precision(
    demo: Path, command: Command
) -> None:
    assert {path.name for path in demo.iterdir()} == set(TARGETS)
    for target, precision in TARGETS.items():
        manifest = load_bundle(demo / target, kind="engines", check=True).manifest
        assert manifest.options["precision"] == precision
        # For every segment, the manifest lists the quantized weights and their formats.
        formats = {
            form for each in manifest.segments for form in each.get("quantized", {}).values()
        }
        recipe = parse_precision(find_target(target).default).recipe
        assert formats == ({rule.choice.format for rule in recipe.rules} if recipe else set())
    for target in ("cpu", "rtx-5090"):
        shown = command("inspect", demo / target).stdout
        assert f"precision {TARGETS[target]}" in shown
        assert ("denoise_batch" in shown) == (target != "cpu")


def test_one_command_builds_int4_for_a_card_and_a_cpu(tmp_path: Path, command: Command) -> None:
    targets = ("rtx-4090", "cpu")
    out = ("--precision", "int4", "-o", tmp_path / "all")
    done = command("build", "demo", "--target", ",".join(targets), *out, timeout=600)
    assert done.returncode == 0, done.stderr
    for target in targets:
        done = command("verify", tmp_path / "all" / target)
        assert done.returncode == 0, done.stderr


def test_the_kernels_of_engines_are_shown(demo: Path, command: Command) -> None:
    done = command("inspect", demo / "cpu", "--kernels")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no kernel lists" in done.stderr
    for target in ("rtx", "rtx-5090"):  # engines for several capabilities, and for one
        done = command("inspect", demo / target, "--kernels", "--batch", "2")
        assert "A prediction, not a measurement" in done.stdout, done.stderr
        shown = json.loads(command("inspect", demo / target, "--kernels", "--json").stdout)
        for made in shown["passes"].values():
            assert made["ms"] == pytest.approx(sum(row["us"] for row in made["each"]) / 1e3)
            assert made["ms"] > made["floor_ms"] > 0
            assert {row["layer"] for row in made["each"]} == {None, 0, 1, 2, 3}


def test_a_cpu_s_lowered_form_says_what_it_is(demo: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "engines"
    done = command("build", "demo", "-t", "cpu", "-p", "nvfp4", "-o", out)
    assert done.returncode == 0, done.stderr
    manifest = load_bundle(out, kind="engines", check=True).manifest
    assert manifest.options["precision"] == "nvfp4"
    assert manifest.embedding["dtype"] == "float32"
    answer = command("generate", out, "12+34=", "--seed", "1", "--json")
    assert json.loads(answer.stdout)["token_ids"], answer.stderr


BLOCKER = """
import sys

class Blocker:
    BLOCKED = {blocked!r}
    def find_spec(self, name, path=None, target=None):
        if name in self.BLOCKED or name.partition(".")[0] in self.BLOCKED:
            raise ImportError(f"blocked: {{name}}")

sys.meta_path.insert(0, Blocker())
from canvasrt.__main__ import main
sys.argv[1:] = {arguments!r}
main()
"""
EXPORT_EXTRA = [
    *("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "safetensors", "modelopt"),
    *("ml_dtypes", "transformers", "canvasrt.export"),
]


def test_quantized_graphs_are_built_with_neither_torch_nor_the_export_installed(
    demo: Path, tmp_path: Path
) -> None:
    """A package's first start builds engines without torch or the export installed."""
    (plan,) = plan_all("demo", parse_targets("rtx-5090"), tmp_path / "out", BuildOptions())
    graphs = graphs_of(plan)
    arguments = ["build", str(graphs.path), "--target", "dgx-spark", "-o", str(tmp_path / "out")]
    code = BLOCKER.format(blocked=EXPORT_EXTRA, arguments=[*arguments, "--max-batch", "1"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load_bundle(tmp_path / "out", kind="engines").manifest.options["precision"] == "nvfp4"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The random checkpoint: in bf16, and in the NVFP4 layout of ModelOpt."""
    from bench import synthetic

    folder = tmp_path_factory.mktemp("narrow")
    for form in ("bf16", "nvfp4"):
        synthetic.write_random_checkpoint(folder / form, "narrow", layers=2, format=form)
    return {form: folder / form for form in ("bf16", "nvfp4")}


def fake_calibrate(weights: Any, recipe: Any, *rest: Any) -> Any:
    """Replaces a real calibration, which takes minutes at this vocabulary size and is tested elsewhere."""
    from canvasrt.export.quantize.calibrate import Calibration

    return Calibration(amax=dict.fromkeys(recipe.formats(weights.config), 8.0))


@pytest.mark.parametrize(
    ("form", "precision", "targets"),
    [
        ("nvfp4", None, "rtx-5090,rtx-pro-6000"),
        ("bf16", "fp8", "rtx-4090,dgx-spark"),
        ("bf16", "bf16", "rtx-4090"),
    ],
)
def test_the_released_head_sizes_experts_and_vocabulary(
    form: str,
    precision: str | None,
    targets: str,
    narrow: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("canvasrt.export.graphs.calibrate", fake_calibrate)
    file = None
    if precision == "fp8":  # prompts are token ids: there is no tokenizer
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt_ids": [5, 6, 7]}\n')
    options = BuildOptions(precision, max_batch=2, calibration=file)
    plans = plan_all(narrow[form], parse_targets(targets), tmp_path / "out", options)
    said: list[str] = []
    with listening(lambda what, *_: said.append(what)):
        made = build_all(plans)
    for plan, bundle in made:
        manifest = bundle.manifest
        assert manifest.options["precision"] == (precision or form)
        assert [layer.head_dim for layer in manifest.model.layers] == [256, 512]
        assert (manifest.model.num_experts, manifest.model.vocab_size) == (128, 262_144)
        body, head = manifest.segments
        # The builder reports less memory for the largest call than the plan estimated.
        assert max(body["activation_bytes"], head["activation_bytes"]) < plan.memory.workspace
        # Scores of all heads at once would take 1.1 GB in bf16, and as much again after the softmax.
        assert body["activation_bytes"] < 0.7e9
    if "rtx-pro-6000" in targets and "rtx-5090" in targets:
        assert "reusing body_0 for rtx-pro-6000" in said
