"""An FP8 cache of keys and values: with device buffers, tokens are the same as on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest

from canvasrt.build.checks import check_source
from canvasrt.build.options import Precision
from canvasrt.build.source import find_source, hash_source
from canvasrt.bundle import load_bundle
from canvasrt.errors import CanvasError
from canvasrt.export.quantize.quantize import quantize_graphs
from canvasrt.pipeline import build_bundle
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.targets import find_target
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.memory import estimate
from tests.helpers.planned import plan
from tests.helpers.reference import Pair

RECIPE = {
    "schema": 1,
    "name": "fp8-cache",
    "description": "The cache, and next to nothing else.",
    "quantize": [{"weights": "signal_mlp.down", "format": "fp8"}],
    "kv_cache": "fp8",
    "calibration": {"prompts": 2, "max_new_tokens": 32},
}
TEXTS = ("Add 17 and 25", "Spell the word garden", "Sort 5 3 9 1", "Count from 3 to 40")


@pytest.fixture(scope="module")
def graphs(demo: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's graphs with an E4M3 cache. They are fp32, since the fake engine runs on a CPU, which cannot multiply
    bf16."""
    folder = tmp_path_factory.mktemp("fp8-cache")
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": TEXTS[0]}))
    made = quantize_graphs(
        demo.graphs, folder / "graphs", folder / "recipe.yaml", folder / "prompts.jsonl"
    )
    return made.path


@pytest.fixture(scope="module")
def device(graphs: Path) -> DeviceModel:
    model = open_model(graphs, check=False, backend=FakeBackend())
    assert isinstance(model, DeviceModel)
    return model


@pytest.fixture(scope="module")
def on_cpu(graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    out = tmp_path_factory.mktemp("fp8-cache-cpu") / "engines"
    return open_model(build_bundle(graphs, "cpu", out).path, threads=1)


def test_a_number_takes_a_byte(device: DeviceModel) -> None:
    space = device.workspace
    assert set(space.itemsizes) == {1}
    need = estimate(
        device.config, "fp32", space.sizes.past["full"], device.max_batch, kv_cache="fp8"
    )
    assert space.bytes["key-value cache"] == need.kv_cache


def test_answers_are_those_of_the_cpu(device: DeviceModel, on_cpu: Model, demo: Pair) -> None:
    """The model is trained. In a model that is unsure of its tokens, the last bit of a sum may decide how a key is
    rounded, and thereby change a token."""
    wanted = [
        Request(
            demo.tokenizer.encode_chat([{"role": "user", "content": text}]),
            SamplingParams.from_defaults(
                device.sampler, device.config, seed=seed, max_new_tokens=96
            ),
        )
        for seed, text in enumerate(TEXTS)
    ]
    ours, theirs = Generator(device, 4).run(wanted), Generator(on_cpu, 1).run(wanted)
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]


def test_bundles_say_what_their_cache_is(graphs: Path, on_cpu: Model) -> None:
    """The manifest contains the format, which determines the memory for serving."""
    assert on_cpu.bundle is not None
    assert on_cpu.bundle.manifest.options["recipe"]["kv_cache"] == "fp8"
    for target, wanted in (("cpu", 4), ("rtx-5090", 1)):
        made = plan(hash_source(find_source(graphs)), target, graphs.parent / "out")
        model = on_cpu.config
        need = estimate(model, "fp8", made.max_context, made.max_batch, on_cpu=target == "cpu")
        assert made.kv_cache == "fp8"
        assert made.memory.kv_cache == need.kv_cache * wanted // (4 if target == "cpu" else 2)
    body = ir.load(load_bundle(graphs, check=False).file("body_0.onnx")).graph
    cached = [value for value in (*body.inputs, *body.outputs) if "_key_" in str(value.name)]
    assert {value.dtype for value in cached} == {ir.DataType.FLOAT8E4M3FN}


def test_where_such_graphs_are_refused(graphs: Path) -> None:
    """Graphs with an FP8 cache cannot run themselves, and engines for a GPU cannot be built from fp32 graphs."""
    with pytest.raises(CanvasError, match="quantized to fp8 and only run as engines"):
        open_model(graphs, check=False)
    with pytest.raises(CanvasError, match="quantized from fp32, but engines for rtx-5090"):
        check_source(find_target("rtx-5090"), Precision("fp8"), hash_source(find_source(graphs)))
