"""The inputs and outputs of a body graph's pieces. Tests of whole generations check what the pieces compute."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from canvasrt.bundle import Bundle
from canvasrt.errors import CanvasError
from canvasrt.graphs.cut import cut_body
from tests.helpers.quantized import SHAPE, Quantized

D, K = SHAPE["hidden_size"], SHAPE["top_k_experts"]
TAKEN = ["carried_0", "carried_1", "shares", "expert_rows"]
HANDED = ["own", "index", "shares_out", "carried_0_out", "carried_1_out"]


def names(values: object) -> list[str]:
    return [value.name for value in values]  # type: ignore[attr-defined]


def shape(values: object, name: str) -> str:
    (found,) = (value for value in values if value.name == name)  # type: ignore[attr-defined]
    dims = ", ".join(str(getattr(each, "value", each)) for each in found.shape)
    return f"{found.dtype.name} {dims}"


@pytest.fixture(scope="module")
def pieces(plain_graphs: Bundle) -> list[ir.Model]:
    return cut_body(ir.load(plain_graphs.file("body_0.onnx")))


def test_there_is_one_piece_more_than_layers(pieces: list[ir.Model]) -> None:
    first, second, last = (each.graph for each in pieces)
    asked = ["positions", "groups", "causal"]
    past = [f"past_{part}" for part in ("key", "value")]
    kinds = ["past_positions_sliding", "past_positions_full"]
    assert names(first.inputs) == ["hidden", *asked, kinds[0], *(f"{p}_0" for p in past)]
    assert names(second.inputs) == [*asked, kinds[1], *(f"{p}_1" for p in past), *TAKEN]
    assert names(first.outputs) == [*HANDED, "new_key_0", "new_value_0"]
    assert names(second.outputs) == [*HANDED, "new_key_1", "new_value_1"]
    # The last piece reads `groups`, but only its shape.
    assert names(last.inputs) == [*asked, *TAKEN]
    assert names(last.outputs) == ["hidden_out"]


def test_tokens_have_two_axes_at_a_cut(pieces: list[ir.Model]) -> None:
    """The segment's inputs have the same two axes for tokens, so its profiles apply to the pieces."""
    states = f"batch, length, {D}"
    inputs, outputs = pieces[1].graph.inputs, pieces[1].graph.outputs
    assert shape(inputs, "carried_0") == shape(outputs, "carried_0_out") == f"BFLOAT16 {states}"
    assert shape(inputs, "shares") == shape(outputs, "shares_out") == f"FLOAT batch, length, {K}"
    assert shape(inputs, "expert_rows") == f"BFLOAT16 {K}, {states}"
    assert shape(outputs, "index") == f"INT32 batch, length, {K}"
    assert shape(outputs, "own") == f"BFLOAT16 {states}"


def test_no_piece_has_experts(pieces: list[ir.Model]) -> None:
    for piece in pieces:
        held = [name for name in piece.graph.initializers if ".experts." in name]
        assert not held
        kinds = {node.op_type for node in piece.graph if ".experts" in str(node.name)}
        assert not kinds & {"MatMul", "CumSum", "Gelu", "Gather"}


def test_every_other_weight_is_in_one_piece(pieces: list[ir.Model], plain_graphs: Bundle) -> None:
    whole = ir.load(plain_graphs.file("body_0.onnx")).graph.initializers
    wanted = {name for name in whole if name.startswith("layers.") and ".experts." not in name}
    found = [n for piece in pieces for n in piece.graph.initializers if n.startswith("layers.")]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("format", ["fp8", "int4", "nvfp4"])
def test_only_fp8_experts_get_rounded_tokens(
    quantized: Callable[..., Quantized], format: str
) -> None:
    """For NVFP4 experts, a separate kernel rounds the tokens."""
    first, *_ = cut_body(ir.load(quantized(format, ("experts.",)).file))
    dtype = "FLOAT8E4M3FN" if format == "fp8" else "BFLOAT16"
    assert shape(first.graph.outputs, "own") == f"{dtype} batch, length, {D}"
    scaled = "layers.0.experts.gate_up.input_scale" in first.graph.initializers
    assert scaled == (format == "fp8")


def test_a_graph_of_another_form_is_refused(plain_graphs: Bundle) -> None:
    model = ir.load(plain_graphs.file("body_0.onnx"))
    weight = model.graph.initializers["layers.1.experts.down"]
    weight.name = "layers.1.mixture.down"
    with pytest.raises(CanvasError, match="experts are not in the form"):
        cut_body(model)
