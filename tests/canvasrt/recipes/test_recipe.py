"""Recipes: canvasrt's own, users' files, and files that are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

import canvasrt.recipes
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.description import describe
from canvasrt.checkpoints.weight_names import matrices, norms
from canvasrt.errors import CanvasError, UsageError
from canvasrt.formats import most_demanding
from canvasrt.recipes import SHIPPED
from canvasrt.recipes.recipe import Recipe, load_recipe
from canvasrt.targets import TARGETS, find_target

FOLDER = Path(canvasrt.recipes.__path__[0])
MINE: dict[str, Any] = {
    "schema": 1,
    "name": "mine",
    "description": "experts",
    "quantize": [{"weights": "layers.*.experts.*", "format": "nvfp4"}],
}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return describe("demo").model


def test_the_readme_has_a_row_per_recipe() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == list(SHIPPED)


def test_every_target_has_its_default_recipe() -> None:
    assert {target.default for target in TARGETS if target.capability} <= {*SHIPPED}


@pytest.mark.parametrize(
    ("name", "formats", "table"),
    [
        ("fp8", {"fp8"}, "fp8"),
        ("int4", {"int4"}, "int8"),
        ("int4-mixed", {"int4", "fp8"}, "fp8"),
        ("nvfp4", {"nvfp4"}, "fp8"),
        ("nvfp4-mixed", {"nvfp4", "fp8"}, "fp8"),
        ("nvfp4-experts", {"nvfp4"}, None),
    ],
)
def test_a_shipped_recipe_accounts_for_every_weight(
    name: str, formats: set[str], table: str | None, config: ModelConfig
) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert Recipe.from_json(recipe.to_json()) == recipe
    chosen = {weight: each.format for weight, each in recipe.formats(config).items()}
    for weight in [*matrices(config), *norms(config), "vision"]:
        excluded = any(fnmatchcase(weight, each.pattern) for each in recipe.excluded)
        assert excluded != (weight in chosen), weight
    assert all(each.why for each in recipe.excluded)
    assert chosen.pop("table", None) == table
    assert {*chosen.values()} == formats
    assert most_demanding(formats) == recipe.precision
    assert all(".experts." in weight for weight in chosen) == (name == "nvfp4-experts")


def test_precisions_and_targets() -> None:
    for name in list(SHIPPED):
        recipe = load_recipe(name)
        able = [target.name for target in TARGETS if recipe.precision in target.precisions]
        assert [each for each in able if recipe.suits(find_target(each))] == able
        assert recipe.suits(find_target("cpu"))
    assert load_recipe("fp8").suits(find_target("rtx-4090"))
    assert not load_recipe("nvfp4").suits(find_target("rtx-4090"))


def test_the_readme_example_is_a_recipe(config: ModelConfig) -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    recipe = Recipe.from_json(yaml.safe_load(example))
    chosen = recipe.formats(config)
    assert chosen["layers.1.attention.o"].weights == "per_channel"
    assert chosen["layers.1.experts.down"].format == "nvfp4"
    assert "layers.0.experts.down" not in chosen
    assert recipe.kv_cache == "fp8"
    assert recipe.limits.kl_p99 == 0.5


def test_the_last_rule_decides_and_exclusions_win(config: ModelConfig) -> None:
    rules = [
        {"weights": "layers.*.experts.*", "format": "nvfp4"},
        {"weights": ["layers.1.*"], "format": "fp8", "method": "mse"},
    ]
    excluded = [{"weights": ["layers.1.*norm", "layers.1.router.*"], "why": "small"}]
    chosen = Recipe.from_json({**MINE, "quantize": rules, "excluded": excluded}).formats(config)
    assert chosen["layers.0.experts.down"].format == "nvfp4"
    assert chosen["layers.1.experts.down"].format == "fp8"
    assert chosen["layers.1.mlp.down"].method == "mse"
    assert "layers.1.router.proj" not in chosen


def test_a_cache_in_fp8_needs_a_gpu_that_has_fp8() -> None:
    rules = [{"weights": "layers.*.mlp.*", "format": "int4"}]
    recipe = Recipe.from_json({**MINE, "quantize": rules, "kv_cache": "fp8"})
    assert recipe.suits(find_target("rtx-4090"))
    assert not recipe.suits(find_target("rtx-3090"))
    assert recipe.precision == "int4"  # the format of its weights
    with pytest.raises(CanvasError, match="lists rtx-3090, which does not support fp8"):
        Recipe.from_json({**recipe.to_json(), "targets": ["rtx-3090"]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema should be 1"),
        ({"colour": "red"}, "unknown key colour"),
        ({"quantize": []}, "quantize should be a list with at least one entry"),
        ({"quantize": None}, "quantize should be"),
        ({"quantize": [{"weights": "table", "format": "int2"}]}, r"quantize\[0\].format should be"),
        ({"quantize": [{"format": "fp8"}]}, r"no quantize\[0\].weights"),
        (
            {"quantize": [{"weights": "x", "format": "fp8", "axis": 0}]},
            r"unknown key quantize\[0\].axis",
        ),
        (
            {"quantize": [{"weights": "x", "format": "nvfp4", "scales": "per_channel"}]},
            "scales should be left out",
        ),
        ({"excluded": [{"weights": "table"}]}, r"no excluded\[0\].why"),
        ({"kv_cache": "None"}, "kv_cache should be one of null, fp8, not 'None'"),
        ({"calibration": {"prompts": 0}}, "calibration.prompts should be a whole number"),
        ({"calibration": {"all_steps": 2}}, "calibration.all_steps should be a number from 0 to 1"),
        ({"limits": {"answers": 1}}, "unknown key limits.answers"),
        ({"limits": {"answers_lost": -1}}, "limits.answers_lost should be"),
        ({"limits": {"kl_mean": float("nan")}}, "limits.kl_mean should be"),
        ({"targets": ["rtx-4090"]}, "targets lists rtx-4090, which does not support nvfp4"),
    ],
    ids=str,
)
def test_documents_that_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CanvasError, match=said):
        Recipe.from_json({**MINE, **change}, "mine.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantize": [{"weights": "layer.*", "format": "fp8"}]}, "'layer.*' matches no weight"),
        ({"excluded": [{"weights": "lm_head", "why": "x"}]}, "'lm_head' matches no weight"),
        (
            {"excluded": [{"weights": "layers.*.experts.*", "why": "x"}]},
            "quantizes nothing",
        ),
        (
            {"quantize": [{"weights": "table", "format": "nvfp4"}]},
            "table cannot be quantized to nvfp4",
        ),
        (
            {"quantize": [{"weights": "table", "format": "fp8", "scales": "per_channel"}]},
            "table has scales: per_channel and method: max",
        ),
        (
            {"quantize": [{"weights": "table", "format": "fp8", "method": "mse"}]},
            "table has scales: per_tensor and method: mse",
        ),
        (
            {"quantize": [{"weights": "layers.0.mlp.down", "format": "int8"}]},
            "down cannot be quantized to int8",
        ),
        ({"quantize": [{"weights": "layers.*", "format": "fp8"}]}, "norm cannot be quantized"),
    ],
    ids=str,
)
def test_recipes_that_do_not_fit_the_model(
    change: dict[str, Any], said: str, config: ModelConfig
) -> None:
    with pytest.raises(CanvasError) as caught:
        Recipe.from_json({**MINE, **change}, "mine.yaml").formats(config)
    assert said in caught.value.message
    assert caught.value.message.startswith("mine.yaml: ")


def test_nvfp4_wants_rows_of_whole_blocks(config: ModelConfig) -> None:
    odd = replace(config, moe_intermediate_size=40)
    with pytest.raises(CanvasError, match=r"layers\.0\.experts\.down has rows of 40") as raised:
        Recipe.from_json(MINE).formats(odd)
    offered = re.fullmatch(
        r"exclude it, or in a later rule give it a format that the target has: (.*)",
        raised.value.hint,
    )
    assert offered
    for name in offered[1].split(" or "):
        rules = [*MINE["quantize"], {"weights": "layers.*.experts.down", "format": name}]
        assert Recipe.from_json({**MINE, "quantize": rules}).formats(odd)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(MINE))
    assert load_recipe(file).name == "mine"
    assert load_recipe(str(file)).precision == "nvfp4"
    file.write_text(yaml.safe_dump(MINE) + "limits: {kl_mean: 1e-3}\n")  # a string in PyYAML
    assert load_recipe(file).limits.kl_mean == 0.001
    file.write_text("schema: 1\nname: [\n")
    with pytest.raises(CanvasError, match=r"mine.yaml, line 3 is not YAML"):
        load_recipe(file)
    file.write_text("- a\n- b\n")
    with pytest.raises(CanvasError, match="should be a mapping"):
        load_recipe(file)
    with pytest.raises(UsageError, match="unknown recipe 'fp16'") as caught:
        load_recipe("fp16")
    assert "nvfp4-experts" in caught.value.hint
