"""Calibration observes what the model computes, and agrees with ModelOpt, which observes transformers."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from canvasrt import calibration_prompts
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.cache import cache_folder
from canvasrt.calibration_prompts import CalibrationPrompts, cache_bytes, default_prompts
from canvasrt.checkpoints.locate import find_checkpoint, fingerprint
from canvasrt.demo.tasks import TASKS, task_of
from canvasrt.errors import CanvasError
from canvasrt.export.graphs import export_graphs
from canvasrt.export.quantize import saved_sweeps
from canvasrt.export.quantize.calibrate import Calibration
from canvasrt.export.quantize.network import StreamedNetwork
from canvasrt.progress import listening
from canvasrt.recipes.recipe import CalibrationSettings, Recipe
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.quantized import calibrate
from tests.helpers.reference import Reference, tiny_model

# In layer 3, this expert is never among the top 2. Its score is 0, and of two opposite router rows, one always scores
# higher.
IDLE_LAYER, IDLE_EXPERT = 3, 5
GENERATION = {
    "max_denoising_steps": 11,
    "sampler_config": {"entropy_bound": 1.0},
    "confidence_threshold": 1.0,
    "max_new_tokens": 64,
    "eos_token_id": [],
}
RECIPE = Recipe.from_json(
    {
        "schema": 1,
        "name": "everything",
        "description": "everything that is observed",
        "quantize": [
            {"weights": ["layers.*.attention.[qo]*", "layers.*.mlp.*"], "format": "fp8"},
            {"weights": ["layers.*.experts.*", "layers.*.router.proj"], "format": "fp8"},
            {"weights": ["signal_mlp.*", "table"], "format": "fp8"},
        ],
        "excluded": [{"weights": "*norm", "why": "no products"}],
        "kv_cache": "fp8",
        "calibration": {"all_steps": 0.5},
    }
)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 100, length).tolist()


# One prompt is shorter than the sliding window, and one is longer.
PROMPTS = [prompt(5, 0), prompt(150, 2)]


@dataclass
class Tiny:
    model: Any
    graphs: Bundle
    file: Path

    def prompts(self, **settings: Any) -> CalibrationPrompts:
        manifest = self.graphs.manifest
        chosen = replace(RECIPE.calibration, **settings)
        return CalibrationPrompts(self.file, None, manifest.model, manifest.sampler, chosen, 4096)

    def calibrate(self, file: Path | None = None, **settings: Any) -> Calibration:
        recipe = replace(RECIPE, calibration=replace(RECIPE.calibration, **settings))
        return calibrate(self.graphs, recipe, file or self.file)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("calibrate")
    torch.set_num_threads(1)
    model = tiny_model()
    with torch.no_grad():
        for layers in (model.model.decoder.layers, model.model.encoder.language_model.layers):
            rows = layers[IDLE_LAYER].router.proj.weight
            for positive, negative in ((0, 1), (2, 3), (6, 7)):
                rows[negative] = -rows[positive]
            rows[IDLE_EXPERT] = 0
    model.save_pretrained(folder / "checkpoint")
    (folder / "checkpoint" / "generation_config.json").write_text(json.dumps(GENERATION))
    graphs = export_graphs(folder / "checkpoint", folder / "graphs", layers_per_segment=4)
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    return Tiny(model, graphs, file)


@pytest.fixture(scope="module")
def found(tiny: Tiny) -> Calibration:
    return tiny.calibrate()


def modelopt_amax(tiny: Tiny) -> Callable[[str], float]:
    """Run ModelOpt's max calibration while transformers generates with the same prompts and noise. Return a function
    that looks up a quantizer's amax."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq

    reference = Reference(tiny.model)

    def generate(model: Any) -> None:
        for request in tiny.prompts():
            reference.generate([request.prompt_token_ids], [request.params])

    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
            {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
            {"quantizer_name": "*vision*", "enable": False},
        ],
        "algorithm": "max",
    }
    named = dict(mtq.quantize(tiny.model, config, generate).named_modules())
    return lambda name: float(named[name]._amax)


ENCODER, DECODER = "model.encoder.language_model", "model.decoder"
MODULES = {
    "attention.qkv": "self_attn.q_proj.",
    "attention.o": "self_attn.o_proj.",
    "mlp.gate_up": "mlp.up_proj.",
    "mlp.down": "mlp.down_proj.",
    "router.proj": "router.proj.",
    "experts.gate_up": "experts.gate_up_proj_",
    "experts.down": "experts.down_proj_",
}


def test_equal_to_modelopt(tiny: Tiny, found: Calibration) -> None:
    """This must be the last test that uses the model, since ModelOpt changes it in place."""
    theirs = modelopt_amax(tiny)
    expected = {}
    for layer in range(6):
        for ours, quantized in MODULES.items():
            # Encoder and decoder share weights, so they share the scale of the inputs.
            expected[f"layers.{layer}.{ours}"] = max(
                theirs(f"{side}.layers.{layer}.{quantized}input_quantizer")
                for side in (ENCODER, DECODER)
            )
    expected["table"] = theirs("lm_head.input_quantizer")
    assert found.amax.keys() - expected.keys() == {"signal_mlp.gate_up", "signal_mlp.down"}
    for name, value in expected.items():
        assert found.amax[name] == pytest.approx(value, rel=1e-4), name
    # The engine computes self-conditioning after a block's last step, too; transformers does not.
    for ours, linear in (("gate_up", "up_proj"), ("down", "down_proj")):
        value = theirs(f"{DECODER}.self_conditioning.{linear}.input_quantizer")
        assert found.amax[f"signal_mlp.{ours}"] >= value * (1 - 1e-4)
    for layer in range(6):
        for part in ("key", "value"):
            value = theirs(f"{ENCODER}.layers.{layer}.self_attn.{part[0]}_bmm_quantizer")
            assert found.cache[f"layers.{layer}.{part}"] == pytest.approx(value, rel=1e-4)
    # Every block begins with the noisiest step, and may end early.
    assert found.steps[0] == 2 * len(PROMPTS) > found.steps[10]


@pytest.mark.parametrize(
    ("share", "full"), [(0, ""), (0.25, "048"), (0.5, "02468"), (1, "0123456789")]
)
def test_prompts_that_take_all_steps_are_spread(
    tiny: Tiny, tmp_path: Path, share: float, full: str
) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text('{"prompt_ids": [5, 6]}\n' * 10)
    requests = list(replace(tiny.prompts(all_steps=share), file=file))
    assert [str(i) for i, each in enumerate(requests) if not each.params.early_stop] == [*full]
    assert [each.params.seed for each in requests] == list(range(10))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate cache, since a failed calibration leaves its progress, which a later test would resume."""
    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
def test_an_interrupted_calibration_goes_on(
    tiny: Tiny, found: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start repeats no saved sweep, yields the same numbers, and leaves no files."""
    rooms = cache_folder() / "calibrations"
    monkeypatch.setattr(saved_sweeps, "SAVE_EVERY", 0)
    sweep, ran = StreamedNetwork._sweep, []

    def interrupted(self: StreamedNetwork, inputs: Any) -> Any:
        if len(ran) in stops:
            stops.remove(len(ran))
            raise KeyboardInterrupt
        ran.append(len(inputs))
        return sweep(self, inputs)

    stops: set[int] = set()
    monkeypatch.setattr(StreamedNetwork, "_sweep", interrupted)
    tiny.calibrate()
    sweeps, stops = len(ran), {3, 12, 15}
    ran.clear()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tiny.calibrate()
        assert len([*rooms.iterdir()]) == 1
    reports: list[int] = []
    with listening(lambda what, done, total: reports.append(done)):
        again = tiny.calibrate()
    assert again.to_json() == found.to_json()
    assert len(ran) == sweeps
    assert reports[0] > 0  # progress bars compute the rate from the first report
    assert not [*rooms.iterdir()]


def test_experts_that_no_token_was_routed_to(found: Calibration) -> None:
    assert found.idle_experts == {IDLE_LAYER: [IDLE_EXPERT]}
    assert found.to_json()["idle_experts"] == {f"layers.{IDLE_LAYER}": [IDLE_EXPERT]}
    assert all(value > 0 for value in found.amax.values())
    per_layer = {sum(counts) for counts in found.routed.values()}
    # Every layer routes each of these tokens to two experts: prompts, one commit per prompt, and all canvases.
    tokens = sum(map(len, PROMPTS)) + 32 * len(PROMPTS) + 32 * sum(found.steps)
    assert per_layer == {2 * tokens}


def test_prompts_are_streamed(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text('{"prompt_ids": [5, 6, 7], "source": "a set"}\n\n' * 30)
    held, seen = [], []
    add = Generator.add

    def counted(self: Generator, request: Any) -> int:
        id = add(self, request)
        held.append(len(self._arrived) + len(self._waiting) + len(self._running))
        return id

    monkeypatch.setattr(Generator, "add", counted)
    config = tiny.graphs.manifest.model
    monkeypatch.setattr(
        calibration_prompts, "CACHE_BYTES", 8 * cache_bytes(config, 3 + config.canvas_length)
    )
    recipe = replace(RECIPE, calibration=CalibrationSettings(25, max_new_tokens=8, all_steps=0))
    with listening(lambda what, done, of: seen.append((what, done, of))):
        calibrate(tiny.graphs, recipe, file)
    assert len(held) == 25
    assert max(held) == 8
    shown = [(done, of) for what, done, of in seen if what == "calibrating"]
    assert shown == sorted(shown)
    assert shown[-1] == (25 * 11, 25 * 11)  # one block of eleven steps per prompt


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'prompt': 1}", "it is not JSON"),
        ('{"prompt": "\udcff"}', "it is not UTF-8"),  # the byte 0xff
        ('{"prompt": ' + "[" * 100_000, "it cannot be read as JSON"),
        ('{"prompt_ids": [' + "9" * 5000 + "]}", "it cannot be read as JSON"),
        ('{"prompt_ids": [' + "9" * 30 + "]}", "its prompt_ids is"),
        ("17", "exactly one of prompt, messages, prompt_ids"),
        ('{"prompt": "a", "prompt_ids": [1]}', "exactly one of"),
        ('{"prompt": ""}', 'its prompt is ""'),
        ('{"prompt": ["a"]}', 'its prompt is ["a"]'),
        ('{"messages": []}', "its messages is []"),
        ('{"messages": [{"role": "user"}]}', "its messages is"),
        ('{"prompt_ids": [1, "2"]}', "its prompt_ids is"),
        ('{"prompt_ids": []}', "the prompt is empty"),
        ('{"prompt_ids": [5, 512]}', "prompt token 512 is not in the vocabulary"),
        (json.dumps({"prompt_ids": [5] * 4090}), "exceed the context of 4096 tokens"),
        ('{"prompt": "hello"}', "the model has no tokenizer"),
    ],
    ids=lambda value: ascii(value[:40]),
)
def test_lines_that_cannot_be_used(tiny: Tiny, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [5, 6]}\n\n' + line + "\n", errors="surrogateescape")
    with pytest.raises(CanvasError) as caught:
        tiny.calibrate(file)
    assert caught.value.message.startswith(f"{file}, line 3: ")
    assert said in caught.value.message


def test_text_is_put_into_the_chat_template(tiny: Tiny, tmp_path: Path) -> None:
    folder = find_checkpoint("demo")
    core = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    template = (folder / "chat_template.jinja").read_text("utf-8")
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "12+34="}]
    lines = [{"prompt": "12+34="}, {"messages": chat}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8-sig")
    with_template = replace(tiny.prompts(), file=file, tokenizer=Tokenizer(core, template))
    expected = with_template.tokenizer.encode_chat(chat)
    assert [list(each.prompt_token_ids) for each in with_template] == [expected, expected]
    plain = replace(with_template, tokenizer=Tokenizer(core, None))
    with pytest.raises(CanvasError, match=r"line 1: the model's tokenizer has no chat template"):
        _ = plain.work
    file.write_text(json.dumps(lines[1]) + "\n")
    with pytest.raises(CanvasError, match=r"line 1: the model's tokenizer has no chat template"):
        _ = plain.work


def test_files_that_cannot_be_used(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    with pytest.raises(CanvasError, match="cannot read"):
        tiny.calibrate(file)
    file.write_text("\n\n")
    with pytest.raises(CanvasError, match=r"prompts\.jsonl contains no prompts"):
        tiny.calibrate(file)
    file.write_text('{"prompt_ids": [5, 6]}\n' * 3 + "broken\n")
    with pytest.raises(CanvasError, match="line 4: it is not JSON"):
        tiny.calibrate(file, prompts=2)


def test_default_prompts(tiny: Tiny) -> None:
    """The demo checkpoints have their own prompts, none of them test questions. All other checkpoints use general
    prompts."""
    general = default_prompts(tiny.graphs.manifest.made_from["files"])
    assert general.name == "prompts.jsonl"
    assert len(general.read_text("utf-8").splitlines()) == 16
    for name in ("demo", "demo-vision"):
        demo = default_prompts(fingerprint(find_checkpoint(name)))
        assert demo.name == "calibration.jsonl"
    prompts = [json.loads(line)["prompt"] for line in demo.read_text("utf-8").splitlines()]
    assert len(prompts) == len(set(prompts)) == 64
    assert {task_of(each).name for each in prompts} == TASKS.keys()
    assert {task_of(each).split(each) for each in prompts} == {"train"}


def with_weight(tiny: Tiny, folder: Path, name: str, value: float) -> Bundle:
    """Copy the graphs, and change the first number of a weight in the first body segment."""
    shutil.copytree(tiny.graphs.path, folder)
    tensor = ir.load(folder / "body_0.onnx").graph.initializers[name].const_value
    with (folder / "body_0.bin").open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.float32(value).tobytes())
    return load_bundle(folder, "graphs", check=False)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, r"layers.2.mlp.down in .*body_0\.bin contains numbers that are not finite"),
        (3e38, "the inputs of .*layers.3.* overflowed during calibration"),
    ],
)
def test_numbers_that_are_not_finite(tiny: Tiny, tmp_path: Path, value: float, said: str) -> None:
    name = "layers.2.mlp.down.weight" if math.isnan(value) else "layers.2.post_norm.weight"
    graphs = with_weight(tiny, tmp_path / "graphs", name, value)
    with pytest.raises(CanvasError, match=said):
        calibrate(graphs, RECIPE, tiny.file)
