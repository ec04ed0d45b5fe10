"""Rules for the table of number formats and for modules that name formats."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from canvasrt.formats import FORMATS, PLAIN, formats_of, most_demanding, weight_limits
from canvasrt.targets import TARGETS

ROOT = Path(__file__).parent.parent.parent
# The table, and modules with code per format: quantizers, and the layouts of quantized checkpoints.
NAMED_IN = {
    "canvasrt/formats.py",
    "export/quantize/quantizers.py",
    "build/source.py",
    "export/modelopt.py",
    "export/compressed_tensors.py",
    # Experts over sorted rows: kernels have a branch per format, and the plan refuses sizes that the blocks of a format
    # do not divide.
    "build/plan.py",
    "canvasrt/sorted_rows/ahead.py",
    "canvasrt/sorted_rows/description.py",
    "canvasrt/sorted_rows/predicted.py",
    "canvasrt/sorted_rows/reference.py",
    "canvasrt/sorted_rows/stacks.py",
    "canvasrt/roofline/cost.py",
    "bench/recipes.py",
    "bench/rows.py",
    # Names of number types, for GPU rates and engines.
    "canvasrt/roofline/rates.py",
    "runtime/backends/tensorrt.py",
    # Default precisions of targets, and tools that measure certain formats.
    "canvasrt/targets.py",
    "bench/synthetic.py",
    "bench/floor.py",
    "bench/predict.py",
    "bench/build.py",
    "bench/hour.py",
}


def test_no_other_module_names_a_format() -> None:
    naming = set()
    for top in ("canvasrt", "export", "build", "runtime", "containers", "bench"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and node.value in FORMATS:
                    naming.add(path.relative_to(ROOT).as_posix())
    assert naming <= NAMED_IN


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_the_table(name: str) -> None:
    format = FORMATS[name]
    assert format.name == name not in PLAIN
    assert format.bits in (4, 8)
    assert format.weight_bytes(4096) >= format.bits / 8
    assert format.cpu_bytes(4096) in (4, format.bits / 8 + 8 / (format.block(4096) or 4096))
    assert format.scale(0.0) == 1
    assert format.scale(2 * format.largest) == 2
    assert bool(format.blocks) == bool(format.scale_bits)
    limits = weight_limits()
    assert limits[None] < limits[name] == format.weight_error < 0.2


def test_blocks_divide_rows() -> None:
    format = FORMATS["nvfp4"]
    assert [format.block(width) for width in (16, 704, 24)] == [16, 16, None]
    assert not format.divides(24)
    assert format.weight_bytes(704) == 0.5625
    shorter = FORMATS["int4"]
    assert [shorter.block(width) for width in (704, 96, 64, 32, 16)] == [64, 32, 32, 16, None]
    assert shorter.blocks_text == "blocks of 64, 32 or 16"
    assert shorter.weight_bytes(704) == 0.5 + 2 / 64
    assert FORMATS["fp8"].divides(24)
    assert FORMATS["fp8"].weight_bytes(24) == 1


def test_a_gpu_has_what_its_capability_has() -> None:
    needs = {"int4": (8, 0), "fp8": (8, 9), "nvfp4": (10, 0)}
    for capability in ((8, 6), (8, 9), (9, 0), (12, 0)):
        able = {name for name, least in needs.items() if capability >= least}
        assert able == needs.keys() & {*formats_of(capability)}
    order = [each for each in formats_of((12, 0)) if each in needs]
    assert order == ["nvfp4", "fp8", "int4"]
    for target in TARGETS:
        assert target.precisions[0] == target.precision
        assert len(set(target.precisions)) == len(target.precisions)
        assert set(target.precisions) <= {*FORMATS, *PLAIN}


def test_of_several_formats_the_one_that_the_fewest_gpus_have() -> None:
    assert most_demanding({"fp8", "nvfp4"}) == "nvfp4"
    assert most_demanding({"fp8", "int4"}) == "fp8"
    assert most_demanding({"int4"}) == "int4"
