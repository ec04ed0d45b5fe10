"""`canvasrt verify --reference`: a bundle matches its checkpoint, or the report says where it differs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.checkpoints.description import describe
from canvasrt.checkpoints.locate import demo_checkpoint
from canvasrt.cli.app import run
from canvasrt.errors import CanvasError
from canvasrt.fidelity import failures, measure_quality, write_report
from canvasrt.fidelity.answers import _generate, compare_pace
from canvasrt.fidelity.observed_model import ObservedModel
from canvasrt.fidelity.prompts import PromptSet
from canvasrt.fidelity.reference import ReferenceModel
from canvasrt.fidelity.report import _check_runs_here
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers import library

Edit = Callable[[np.ndarray], np.ndarray]


def edited(bundle: Path, out: Path, edits: Mapping[str, Edit], **options: Any) -> Path:
    """Copy a bundle, change some weights, and write a matching manifest."""
    made = load_bundle(bundle).manifest
    shutil.copytree(bundle, out)
    for file in sorted(out.glob("body_*.onnx")):
        for name, value in ir.load(file).graph.initializers.items():
            if name in edits:
                tensor: Any = value.const_value
                weights = np.memmap(
                    tensor.path, np.float32, "r+", tensor.offset, tuple(tensor.shape.numpy())
                )
                weights[:] = edits[name](weights)
                weights.flush()
    (out / "manifest.json").unlink()
    write_manifest(
        out,
        kind=made.kind,
        made_from=made.made_from,
        options={**made.options, **options},
        model=made.model,
        sampler=made.sampler,
        segments=made.segments,
        embedding=made.embedding,
        tokenizer=made.tokenizer,
        target=made.target,
    )
    return out


def off_by_a_tenth(weights: np.ndarray) -> np.ndarray:
    return weights * np.float32(1.1)


def noisy(weights: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, weights.std(), weights.shape)
    return weights + noise.astype(np.float32)


def test_a_bundle_agrees_with_its_checkpoint(
    tiny: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_pace(model: Any, reference: Any, prompts: PromptSet) -> Any:
        return compare_pace(model, reference, replace(prompts, tokens=prompts.tokens[:1]))

    monkeypatch.setattr("canvasrt.fidelity.report.compare_pace", one_pace)
    assert run(["verify", str(tiny.bundle), "--reference", str(tiny.checkpoint), "--json"]) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]
    steps = quality["steps"]
    assert steps["prompt_kind"] == "random"
    assert steps["all"]["positions"] == 4 * 12 * 32
    assert steps["all"]["argmax_agreement"] == 1
    assert steps["all"]["entropy_error_max"] < 1e-3
    assert all(0 <= part["kl_mean"] < 1e-8 for part in steps["by_phase"].values())
    assert len(steps["by_step"]) == 12
    assert [each["layers"] for each in quality["segments"]] == [[0, 1, 2, 3], [4, 5]]
    for part in (*quality["segments"], *quality["layers"]):
        errors = [part[key] for key in ("hidden_out", "keys", "values") if key in part] or [part]
        assert all(0 < each[phase] < 1e-5 for each in errors for phase in ("encode", "denoise"))
    assert 0 < quality["head"]["logits"] < 1e-5
    assert 0 < quality["head"]["next_hidden"] < 1e-5
    assert {each["error"] for each in quality["weights"]} == {0}
    assert len(quality["experts"]) == 6 * 8
    assert quality["pace"]["steps_growth"] == 0
    assert quality["answers"] is None


@pytest.mark.acceptance
def test_int4_is_within_its_limits_of_the_demo(capsys: Any) -> None:
    """For a CPU, weights stay packed, and the experts' inputs are rounded differently than on a GPU."""
    bundle = library.bundle("demo", precision="int4")
    arguments = ["verify", str(bundle), "--reference", "demo", "--questions", "0", "--json"]
    assert run(arguments) == 0
    quality = json.loads(capsys.readouterr().out)["quality"]
    assert quality["recipe"] == "int4"
    found = {each["name"]: each for each in quality["limits"]}
    assert 0.02 < found["weight_error_int4"]["measured"] < found["weight_error_int4"]["limit"]
    assert 0 < quality["steps"]["all"]["kl_mean"] < found["kl_mean"]["limit"]


def test_it_does_not_agree_with_a_checkpoint_that_was_edited(
    tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    copy = shutil.copytree(tiny.checkpoint, tmp_path / "edited")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.decoder.layers.3.layer_scalar"] *= 1.05
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    bundle = edited(tiny.bundle, tmp_path / "bundle", {}, adapters=[{"files": {}, "weight": 1}])
    assert run(["verify", str(bundle), "--reference", str(copy), "--questions", "0"]) == 1
    captured = capsys.readouterr()
    assert "does not compute what" in captured.err
    assert "adapters are merged into it" in captured.err
    assert re.search(r"Layers, worst first\n.*\n3 +sliding", captured.out)


def test_whole_generations_fit_the_engines_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvasrt.fidelity.answers._run", lambda side, requests, what: requests)
    demo = describe("demo")
    config = demo.model
    reference: Any = SimpleNamespace(config=config, sampler=demo.sampler)
    prompts = PromptSet("texts", [[5] * 9, [5] * 20])
    for context, tokens in ((100, 64), (4096, 256)):
        engines: Any = SimpleNamespace(max_context=context)
        pairs: Any = _generate(engines, reference, prompts, None)
        assert {ours.params.max_new_tokens for ours, _ in pairs} == {tokens}


def test_a_checkpoint_of_another_shape_is_refused(tiny: Any) -> None:
    with pytest.raises(CanvasError, match="have different shapes"):
        measure_quality(load_bundle(tiny.bundle), describe(demo_checkpoint()), questions=0)


def test_the_hint_for_engines_of_a_gpu_is_a_command_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("canvasrt.fidelity.report.gpus", list)
    target = {"name": "h100", "backend": "tensorrt"}
    kept = {"recipe": {"name": "fp8-checkpoint"}, "checkpoint_quantization": {}}
    for options, asked in (
        ({"recipe": {"name": "fp8"}}, "cpu --precision fp8`"),
        ({"recipe": {"name": "mine"}}, "cpu --precision RECIPE.yaml`"),
        (kept, "--target cpu`"),
    ):
        manifest = SimpleNamespace(target=target, options=options)
        bundle: Any = SimpleNamespace(path="engines", manifest=manifest)
        with pytest.raises(CanvasError, match="has no GPU to run it") as caught:
            _check_runs_here(bundle)
        assert asked in caught.value.hint


def test_the_report_of_the_demo(demo: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "report"
    arguments = ["verify", str(demo.bundle), "--reference", "demo", "--questions", "3"]
    assert run([*arguments, "--report", str(out), "--json"]) == 0
    quality = json.loads((out / "report.json").read_text())
    assert quality == json.loads(capsys.readouterr().out)["quality"]
    everything = quality["answers"]["all"]
    assert everything["asked"] == 8 * 3
    # With the same noise, both sides generate the same tokens.
    assert everything["lost"] == everything["gained"] == 0
    assert everything["bundle"] == everything["reference"]
    assert quality["pace"]["bundle"] == quality["pace"]["reference"]
    low, high = everything["loss_interval"]
    assert low < 0 < high
    page = (out / "report.html").read_text()
    assert "Within its limits." in page
    assert re.search(r"<td>brackets</td>\s*<td>3</td>", page)
    drawings = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(drawings) == 6
    for drawing in drawings:
        assert "aria-label" in ElementTree.fromstring(drawing).attrib
    ids = re.findall(r' id="([^"]+)"', page)
    shared = {each for each in ids if ids.count(each) > 1}
    assert not {each for each in shared if f"#{each}" in page}, "plots share what they refer to"
    assert "http://" not in re.sub(r"http://www\.w3\.org\S*", "", page)

    assert run([*arguments, "--report", str(out)]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_a_wrong_layer_and_a_wrong_expert_are_found(demo: Any, tmp_path: Path) -> None:
    # Wrong scales only count in `gate_up`: a matrix next to a norm may be scaled without effect.
    wrong: dict[str, Edit] = {"layers.2.mlp.gate_up.weight": off_by_a_tenth}
    wrong |= {f"layers.2.experts.gate_up.{expert}": off_by_a_tenth for expert in range(8)}
    bundle = edited(demo.bundle, tmp_path / "wrong", wrong | {"layers.1.experts.down.5": noisy})
    report = measure_quality(load_bundle(bundle), describe(demo.checkpoint), questions=0)
    assert not report["ok"]
    said = failures(report)
    assert "worst layer, relative error (layer " in said
    assert "relative error (layers.1.experts.down, expert 5)" in said
    assert "mean KL divergence" in said
    worst = report["worst"]
    assert {each["layer"] for each in worst["layers"][:2]} == {1, 2}
    others = [each["denoise"] for each in report["layers"] if each["layer"] not in (1, 2)]
    assert min(each["denoise"] for each in worst["layers"][:2]) > 1e3 * max(others)
    found = {each["name"]: each["error"] for each in worst["weights"]}
    assert found["layers.2.mlp.gate_up"] == pytest.approx(0.1, rel=1e-3)
    assert found["layers.2.experts.gate_up"] == pytest.approx(0.1, rel=1e-3)
    expert = worst["experts"][0]
    assert (expert["layer"], expert["expert"]) == (1, 5)
    assert expert["gate_up"] == 0 < 0.5 < expert["down"]
    assert expert["output"] > 0.5


@pytest.mark.acceptance
def test_a_recipes_limits_decide(demo: Any, tmp_path: Path, capsys: Any) -> None:
    names = ("attention.qkv.weight", "attention.o.weight", "mlp.gate_up.weight", "mlp.down.weight")
    wrong = {f"layers.{layer}.{name}": noisy for layer in range(4) for name in names}
    limits = {"answers_lost": 2.0, "steps_growth": 0.05, "kl_mean": 100.0}
    recipe = {"name": "mine", "limits": limits}
    bundle = edited(demo.bundle, tmp_path / "wrong", wrong, recipe=recipe)
    arguments = ["verify", str(bundle), "--reference", "demo", "--questions", "5", "--json"]
    assert run(arguments) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)["quality"]
    assert [(each["name"], each["ok"]) for each in report["limits"]] == [
        ("answers_lost", False),
        ("steps_growth", report["pace"]["steps_growth"] <= 0.05),
        ("kl_mean", True),
        ("weight_error_others", False),
    ]
    assert "right answers lost per 100" in captured.err
    assert report["answers"]["all"]["lost"] > 5


def test_weights_that_are_no_numbers_are_reported(demo: Any, tmp_path: Path, capsys: Any) -> None:
    nothing = {"layers.0.experts.down.3": lambda weights: weights * np.float32(np.nan)}
    bundle = edited(demo.bundle, tmp_path / "wrong", nothing)
    out = tmp_path / "report"
    arguments = ["verify", str(bundle), "--reference", "demo", "--questions", "0"]
    assert run([*arguments, "--report", str(out)]) == 1
    assert "(layers.0.experts.down, expert 3): inf, at most" in capsys.readouterr().err

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    report = json.loads((out / "report.json").read_text(), parse_constant=refuse)
    assert not report["ok"]
    assert "Outside its limits." in (out / "report.html").read_text()


class WithoutInside(ObservedModel):
    """A model without access to graphs and logits, like GPU engines."""

    def __init__(self, bundle: Bundle, streamed: bool = False) -> None:
        super().__init__(bundle, streamed)
        self.backend = self.head = None


@pytest.mark.acceptance
def test_engines_that_cannot_be_looked_into(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.fidelity.report.ObservedModel", WithoutInside)
    report = measure_quality(load_bundle(demo.bundle), describe(demo.checkpoint), questions=1)
    assert report["ok"]
    assert report["segments"] is report["experts"] is report["steps"]["all"]["kl_mean"] is None
    assert report["answers"]["all"]["asked"] == 8
    write_report(report, "demo", tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Within its limits; not measured: mean KL divergence" in page
    assert "<h2>Segments" not in page
    assert page.count("<svg ") == 3


@pytest.mark.parametrize("length", [7, 65])
def test_the_reference_generates_what_transformers_does(
    tiny: Any, prompt: Any, length: int
) -> None:
    """Generates three blocks with prompts at the edge of the sliding window, and with early stop."""
    params = SamplingParams(
        seed=length,
        max_new_tokens=96,
        max_denoising_steps=11,
        entropy_bound=1.0,
        confidence_threshold=1.0,
    )
    ids = prompt(length, length)
    expected = tiny.reference.generate([ids], [params])
    (result,) = Generator(ReferenceModel(describe(tiny.checkpoint))).run([Request(ids, params)])  # type: ignore[arg-type]
    expected.check([result])
