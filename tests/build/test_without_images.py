"""Engines for GPUs without room for the vision tower. They are really built, then run on a fake TensorRT."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from canvasrt.build.options import BuildOptions
from canvasrt.build.plan import Plan, PrefillPlan
from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.errors import CanvasError
from canvasrt.expert_slots import ROOMY
from canvasrt.pipeline import build_all, build_bundle, graphs_of, plan_all
from canvasrt.runtime.backends.tensorrt import TensorRTBackend
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import insert, read_picture
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.targets import Target, find_target, parse_targets
from tests.helpers.fake_tensorrt import FakeCudaDevice, engine_file, fake_tensorrt
from tests.helpers.pictures import noise, png
from tests.helpers.random_models import BASE, random_model

pytestmark = pytest.mark.acceptance

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")

OPTIONS = BuildOptions("int4", max_context=1024, max_batch=1)
# The tower is larger than the memory that shorter passes would save.
TOWER = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a large vision tower and many tokens per expert."""
    folder = tmp_path_factory.mktemp("sight") / "checkpoint"
    shape = {**BASE, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    random_model(shape, canvas=32, vision=TOWER).save_pretrained(folder)
    return folder


def with_memory(name: str, checkpoint: Path, bytes_left: int) -> Target:
    """Return a target whose GPU has the memory that engines without the tower need, plus `bytes_left`."""
    (plan,) = plan_all(checkpoint, [find_target(name)], "unused", OPTIONS)
    assert plan.reading == PrefillPlan(512, sees=True)
    return replace(
        plan.target, memory=plan.memory_when(PrefillPlan(512, sees=False)).total + bytes_left
    )


@pytest.fixture(scope="module", params=["rtx-4080", "rtx-5080"])
def built(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, Bundle]:
    """Engines for a GPU on which they just fit without the tower."""
    card = with_memory(request.param, checkpoint, 0)
    plans = plan_all(checkpoint, [card], tmp_path_factory.mktemp("blind") / "engines", OPTIONS)
    ((plan, bundle),) = build_all(plans)
    return plan, bundle


def segments(bundle: Bundle) -> list[str]:
    return [each["name"] for each in bundle.manifest.segments]


def test_the_engines_leave_the_tower_out(built: tuple[Plan, Bundle]) -> None:
    plan, bundle = built
    made = load_bundle(bundle.path, kind="engines", check=True)
    assert made.manifest.options["vision"] is False
    assert segments(made) == ["body_0", "head"]
    assert not [file for file in made.manifest.files if "vision" in file]
    assert plan.fits
    # Bodies also lack the slots for images. With images, experts need one slot per token, since an image's tokens
    # cannot be divided among passes.
    encode = made.manifest.segments[0]["profiles"][0]
    assert encode["length"]["max"] == 512
    assert encode["capacity"]["max"] == ROOMY


def test_a_card_with_the_room_gets_it(checkpoint: Path, tmp_path: Path) -> None:
    bundle = build_bundle(checkpoint, "rtx-4080", tmp_path / "engines", OPTIONS)
    assert segments(bundle) == ["body_0", "head", "vision"]
    assert bundle.manifest.segments[0]["profiles"][0]["capacity"]["max"] == 512
    assert "vision" not in bundle.manifest.options


def opened(bundle: Bundle, graphs: Bundle, folder: Path) -> DeviceModel:
    """Open a copy of the bundle in which every engine is replaced by its segment's fp32 graph with the real profiles. A
    fake TensorRT runs them."""
    manifest, device = bundle.manifest, FakeCudaDevice()
    shutil.copytree(bundle.path, folder)
    (folder / "manifest.json").unlink()
    files = {each["name"]: graphs.file(each["file"]) for each in graphs.manifest.segments}
    for each in manifest.segments:
        file = folder / each["file"]
        file.unlink()
        file.write_bytes(engine_file(files[each["name"]], each["profiles"]))
    shutil.copy(graphs.file(graphs.manifest.embedding["file"]), folder)
    write_manifest(
        folder,
        kind="engines",
        made_from={},
        options=manifest.options,
        model=manifest.model,
        sampler=manifest.sampler,
        segments=manifest.segments,
        embedding=graphs.manifest.embedding,
        tokenizer=None,
        target=manifest.target,
    )
    version = str((manifest.target or {})["builder_version"])
    device.capability = tuple(map(int, manifest.target["compute_capability"].split(".")))
    module = fake_tensorrt(version, True, device)
    backend = TensorRTBackend(manifest.target, False, module, device)  # type: ignore[arg-type]
    model = open_model(folder, backend=backend)
    assert isinstance(model, DeviceModel)
    return model


def texts(vocabulary: int, lengths: Sequence[int]) -> list[Request]:
    random = np.random.default_rng(1)
    params = SamplingParams(max_new_tokens=32, max_denoising_steps=3, entropy_bound=1.0)
    return [
        Request(random.integers(6, vocabulary, length).tolist(), replace(params, seed=length))
        for length in lengths
    ]


def test_they_answer_text_and_refuse_images(
    built: tuple[Plan, Bundle], checkpoint: Path, tmp_path: Path
) -> None:
    _, bundle = built
    (plan,) = plan_all(checkpoint, parse_targets("cpu"), tmp_path / "cpu", BuildOptions("fp32"))
    graphs = graphs_of(plan)
    model = opened(bundle, graphs, tmp_path / "fake")
    model.warm_up()
    wanted = texts(500, [9, 700])
    ours = Generator(model).run(wanted)
    theirs = Generator(open_model(graphs.path, threads=1)).run(wanted)
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    config = bundle.manifest.model
    assert config.vision is not None
    picture = read_picture(png(noise(90, 70, 1)), config.vision, 70)
    prompt = insert([7, config.image_token_id, 9], [picture], config)
    assert not model.has_vision
    with pytest.raises(CanvasError, match="the engines have no vision tower"):
        Generator(model).run([Request(prompt, wanted[0].params, [picture])])
