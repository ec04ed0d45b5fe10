"""Compiling kernels without their GPU, in a child process in which Triton (the language) compiles."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from canvasrt.errors import CanvasError
from canvasrt.sorted_rows import ahead
from canvasrt.sorted_rows.description import ExpertSizes, KernelForm
from canvasrt.sorted_rows.predicted import instruction

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
# Every kernel is compiled for these capabilities. For other capabilities, only `gate_up` is, in each format but INT4.
WHOLE = ((8, 9), (12, 0))
WHOLE_ELSEWHERE = tuple(each for each in CAPABILITIES if each not in WHOLE)
# Capability 8.9 lacks NVFP4. Of the other capabilities, three have all formats, one lacks NVFP4, and two also lack FP8.
IMAGES = {WHOLE: (7 + 10) + (3 * 3 + 2 + 2 * 1), WHOLE_ELSEWHERE: 3 * 10 + 7 + 2 * 5}
CODE = """
import json, sys, torch
from canvasrt.sorted_rows.ahead import compile_kernel
from canvasrt.sorted_rows.description import ExpertSizes, KernelForm

NEEDED = {"fp8": [8, 9], "nvfp4": [10, 0], "round_rows": [10, 0]}
sizes = ExpertSizes(128, 8, 2816, 704)
plain = "bfloat16"
forms = [
    KernelForm("sort_rows", sizes, plain),
    KernelForm("gate_up", sizes, plain), KernelForm("down", sizes, plain),
    KernelForm("gate_up", sizes, plain, "int4", None, 64),
    KernelForm("down", sizes, plain, "int4", None, 64),
    KernelForm("gate_up", sizes, plain, "fp8", "fp8"), KernelForm("down", sizes, plain, "fp8"),
    KernelForm("round_rows", sizes, plain), KernelForm("gate_up", sizes, plain, "nvfp4", "nvfp4"),
    KernelForm("down", sizes, plain, "nvfp4"),
]
found, whole = [], json.loads(sys.argv[2])
for capability in json.loads(sys.argv[1]):
    for form in forms:
        if capability < NEEDED.get(form.format or form.function, [8, 0]):
            continue
        if capability not in whole and (form.function != "gate_up" or form.format == "int4"):
            continue
        made = compile_kernel(form, tuple(capability))
        found.append({
            "capability": capability, "name": form.name, "entry": made.entry, "ptx": made.ptx,
            "image": made.image.decode("latin1"), "shared": made.shared, "threads": made.threads,
        })
print(json.dumps(found))
"""


@pytest.fixture(
    scope="module",
    params=[WHOLE, pytest.param(WHOLE_ELSEWHERE, marks=pytest.mark.acceptance)],
    ids=["each in part", "the others whole"],
)
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="needs canvasrt[sorted]")
    whole = request.param
    wanted = CAPABILITIES if whole == WHOLE else whole
    command = [sys.executable, "-c", CODE, *map(json.dumps, (wanted, whole))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == IMAGES[whole]
    return found


def test_each_capability_has_an_image_of_each_kernel(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        major, minor = each["capability"]
        assert each["image"].startswith("\x7fELF")
        assert f".target sm_{major}{minor}" in each["ptx"]
        assert f".visible .entry {each['entry']}(" in each["ptx"]
        assert f".reqntid {each['threads']}" in each["ptx"]
        # Divisions in this kernel must be exact, to round as the graph does. Other kernels may divide approximately.
        if each["name"] == "round_rows-bfloat16":
            assert "div.rn.f32" in each["ptx"]
            assert "div.full" not in each["ptx"]
        # Every GPU provides this much shared memory by default.
        assert each["shared"] <= 48 << 10


def test_products_run_on_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    """FP8 and NVFP4 codes are multiplied directly where Triton supports it for this few rows. Elsewhere, they are
    converted to float16 without loss."""
    for each in compiled:
        wanted = "bf16.bf16.f32"
        if "-nvfp4" in each["name"]:
            native = each["capability"] == [12, 0]
            wanted = "scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3" if native else "f16.f16.f32"
        elif "-fp8" in each["name"]:
            native = each["capability"] in ([8, 9], [12, 0])
            wanted = "e4m3.e4m3.f32" if native else "f16.f16.f32"
        if each["name"].startswith(("sort_rows", "round_rows")):
            assert instruction(each["ptx"]) == ""
        else:
            assert instruction(each["ptx"]).endswith(wanted), (each["name"], each["capability"])


def listed(images: list[dict[str, Any]], folder: Path, *options: str) -> list[str]:
    """Return the output of `cuobjdump` for each compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = []
    for number, each in enumerate(images):
        file = folder / f"{number}.cubin"
        file.write_bytes(each["image"].encode("latin1"))
        done = subprocess.run([tool, *options, file], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    return found


def test_nothing_is_spilled(compiled: list[dict[str, Any]], tmp_path: Path) -> None:
    for each, text in zip(compiled, listed(compiled, tmp_path, "-sass"), strict=True):
        assert "EXIT" in text
        assert not re.search(r"\b(STL|LDL)\b", text), (each["name"], each["capability"])


def test_int4_reads_a_block_s_scale_once(compiled: list[dict[str, Any]], tmp_path: Path) -> None:
    """Both halves of a step are in the same block."""
    products = [
        each
        for each in compiled
        if "-int4" in each["name"] and each["capability"] in ([8, 9], [8, 6])
    ]
    reads = [text.count("LDG.E.U16") for text in listed(products, tmp_path, "-sass")]
    assert dict(zip([each["entry"] for each in products], reads, strict=True)) == {
        "gate_up": 8,
        "down": 4,
    }


def test_arguments_are_in_the_order_in_which_the_runtime_gives_them(
    compiled: list[dict[str, Any]],
) -> None:
    """The compiler appends two addresses of scratch memory to the arguments."""
    kinds = {"*": "u64", "i32": "u32", "fp32": "f32"}
    for each in compiled:
        name, _, _ = each["name"].partition("-")
        types = ahead.argument_types(KernelForm(name, ExpertSizes(8, 2, 64, 64), "bfloat16"))
        wanted = [kinds["*" if kind.startswith("*") else kind] for kind in types.values()]
        head = each["ptx"].partition(".entry")[2].partition(")")[0]
        found = [
            line.split()[1].removeprefix(".") for line in head.splitlines() if ".param" in line
        ]
        assert found == [*wanted, "u64", "u64"]


def test_images_name_no_folder_of_this_machine(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        assert "triton_kernels.py" not in each["image"]
        assert str(Path(ahead.__file__).parent) not in each["image"]


def test_without_triton_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(CanvasError, match="triton is not installed") as caught:
        ahead.compile_kernel(KernelForm("sort_rows", ExpertSizes(8, 2, 64, 64), "bfloat16"), (8, 9))
    assert "canvasrt[sorted]" in str(caught.value.hint)
