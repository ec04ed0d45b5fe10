"""Parsing the builder's list of kernels, including lists in an unknown form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from canvasrt.build import compile
from canvasrt.errors import CanvasError
from canvasrt.roofline.cost import BITS
from canvasrt.roofline.parse import parse


def line(name: str, kind: str = "kgen") -> str:
    tensor = "{ Name: x, Dimensions: [2,-1], Datatype: Half, Format: (Linear) Row major }"
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [{tensor}], Outputs: [{tensor}], TacticName: t, "
    )


def names(*lines: str) -> list[list[str]]:
    return [[each.name for each in program] for program in parse("\n".join(["Layers:", *lines]))]


def test_kernels_are_sorted_by_profile() -> None:
    """A kernel that states no profile belongs to the profile of other kernels with its Myelin number; if there are
    none, to the first profile."""
    lines = ("a_myl0_1", "b_myl3_1 [profile 1]", "c_myl3_2", "d")
    assert names(*map(line, lines)) == [["a_myl0_1", "d"], ["b_myl3_1", "c_myl3_2"]]


def test_a_profile_may_be_named_by_a_kernel_without_a_number_alone() -> None:
    assert names(line("a"), line("Reformatting CopyNode [profile 1]", "Reformat")) == [
        ["a"],
        ["Reformatting CopyNode"],
    ]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("Strides: [64,-1,1], Datatype: BFloat16, Format: (Arbitrary) Format [1,2,0]", "BFloat16"),
        ("Format/Datatype: Half", "Half"),
        ("Format/Datatype: Row major linear FP32", "Float"),
        ("Format/Datatype: Channel major FP16 format where channel % 8 == 0", "Half"),
        ("Format/Datatype: Thirty-two wide channel vectorized row major Int8 format", "Int8"),
    ],
)
@pytest.mark.parametrize("place", ["", "Location: Device, "])
@pytest.mark.parametrize(
    "rest",
    [
        "",
        ", TacticName: t, StreamId: 0, Metadata: [ONNX Layer: n]",
        ', Stride: [1,1], Weights: {"Type": "Half", "Count": 64}, HasBias: 1, TacticName: t, Metadata: [ONNX Layer: n]',
    ],
    ids=["short", "plain", "with weights"],
)
def test_forms_of_all_releases_are_parsed(form: str, dtype: str, place: str, rest: str) -> None:
    """The forms are from NVIDIA's documentation and public issues, for TensorRT 8 to 11."""
    tensor = f"{{ Name: x [profile 0], {place}Dimensions: [1,64,-1], {form} }}"
    tensors = f"Inputs: [ {tensor}, {tensor}], Outputs: [ {tensor}]"
    [[kernel]] = parse(f"Layers:\nName: conv + relu, LayerType: CaskConvolution, {tensors}{rest}")
    assert [len(kernel.inputs), len(kernel.outputs)] == [2, 1]
    for each in kernel.tensors:
        assert (each.name, each.dtype, each.dims) == ("x", dtype, (1, 64, -1))
        assert each.dtype in BITS
    assert (kernel.tactic, kernel.nodes) == (("t", ("n",)) if rest else ("", ()))


def test_a_line_of_another_form_is_refused() -> None:
    with pytest.raises(CanvasError, match="cannot parse a line of the builder's kernel list"):
        names("Name: a, LayerKind: kgen")


@pytest.mark.parametrize("listed", ["Layers:\nName: a", "Layers:\n" + line("a [profile 7]")])
def test_a_list_that_cannot_be_read_ends_no_build(
    listed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = compile.Job("trt", tmp_path / "a.onnx", tmp_path / "a.engine", (), {"all": {}})
    network = SimpleNamespace(num_layers=0, num_inputs=0)
    compile._write_kernels(SimpleNamespace(), network, job, listed)
    assert "WARNING: the kernels cannot be listed" in capsys.readouterr().out
    assert not job.kernels.exists()
    compile._write_kernels(None, None, job, listed)
    assert "WARNING: the kernels cannot be listed: AttributeError" in capsys.readouterr().out
