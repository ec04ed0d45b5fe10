"""Sizes that the builder prints as −1 are found by matching shapes of the graph."""

from __future__ import annotations

import pytest

from canvasrt.roofline.parse import Kernel, KernelTensor, graph_names
from canvasrt.roofline.resolve import closest, resolve_sizes
from canvasrt.roofline.tensor_shapes import Dims, Node, Shapes

BODY = ("batch", "length", 2816)


def kernel(
    nodes: tuple[str, ...], *inputs: KernelTensor, name: str = "k", **outputs: Dims
) -> Kernel:
    """Return a kernel that runs these nodes of the graph. `outputs`: name → sizes."""
    written = tuple(KernelTensor(each, "Half", dims) for each, dims in outputs.items())
    return Kernel(name, "kgen", inputs, (), written, "", nodes)


@pytest.mark.parametrize(
    ("printed", "shape", "found"),
    [
        ((-1, -1, 2816), BODY, BODY),
        ((-1, 2816), BODY, ("batch*length", 2816)),
        ((-1, 256), ("batch", "length", 8, 32), ("batch*length", 256)),
        ((-1, -1, 32, 256), ("batch", "length", 8192), ("batch", "length", 32, 256)),
        ((-1, 8, -1, 256), ("batch", "length", 2048), None),
        ((-1, -1, 2, 1), ("batch", "length", 2, 32), ("batch", "length", 2, 1)),
        ((2, 512, -1), (1, 2, "past_full+256", 512), (2, 512, "past_full+256")),
        ((128, -1, 4, 32, 44, 4), (128, "capacity", 176), (128, "capacity/128", 4, 32, 44, 4)),
        ((-1, 4, 32, 44, 4), ("batch", 256, 176), ("256*batch/128", 4, 32, 44, 4)),
        ((-1, 77), BODY, None),
        ((-1, 2816), (256, 2816), None),
        ((128, -1), (64, "capacity"), None),
        # A router's 5 columns are padded to 6. Three products that are computed as one have the columns of all three.
        ((1, -1, 6), (1, "length", 5), (1, "length", 6)),
        ((-1, 192), ("batch", "length", 64), ("batch*length", 192)),
        ((1, -1, 192), (1, "length", 64), (1, "length", 192)),
        ((1, -1, 3), (1, "length", 5), None),
    ],
)
def test_a_printed_shape_is_one_of_the_graph_s(
    printed: tuple, shape: tuple, found: tuple | None
) -> None:
    assert closest(printed, [shape]) == found


def test_a_sum_is_never_merged_with_what_stands_beside_it() -> None:
    keys = ("batch", 8, "length+past_full", 256)
    assert closest((-1, -1, 256), [keys]) == ("8*batch", "length+past_full", 256)


def test_what_was_found_of_a_tensor_holds_where_it_is_read() -> None:
    """Kernels that read a tensor use the shape found for the kernel that wrote it. Sizes that the profile fixes are
    numbers."""
    shapes = Shapes({}, {"norm": Node([("x", BODY)], [("y", BODY)])})
    written = kernel(("norm",), t_1=(-1, 256, 2816))
    read = kernel((), KernelTensor("t_1", "Float", (-1, 2816)))
    first, second = resolve_sizes([written, read], shapes, {"length": 256})
    assert first.outputs[0].dims == ("batch", 256, 2816)
    assert second.inputs[0].dims == ("256*batch", 2816)


def test_a_sum_over_an_axis_is_not_taken_for_its_operand() -> None:
    """Finding the experts' slots sums `[T, E, C]` over all tokens to `[E, C]`, which the builder prints as `[1, E,
    -1]`."""
    counted = ("batch", 256, 8, "capacity")
    nodes = {"count": Node([("less", (256, 8, "capacity"))], [("sum", (8, "capacity"))])}
    nodes["less"] = Node([("queue", (256, 8, 1)), ("slots", ("capacity",))], [("less", counted)])
    # The builder lists nodes in any order.
    made = kernel(("count", "less"), KernelTensor("a_1", "Int32", (1, 1, -1)), t_1=(1, 8, -1))
    (found,) = resolve_sizes([made], Shapes({}, nodes))
    assert found.outputs[0].dims == (1, 8, "capacity")
    assert found.inputs[0].dims == (1, 1, "capacity")


def test_a_shape_that_nothing_tells_stays_unknown() -> None:
    lost = KernelTensor("t", "Float", (-1, 5))
    (found,) = resolve_sizes([kernel((), lost)], Shapes({}, {}))
    assert found.inputs[0].dims == ("?", 5)


PAST, JOINED = "8*octets_sliding", "length+8*octets_sliding"


@pytest.mark.parametrize(
    ("batch", "heads", "printed"),
    [
        # Heads share keys.
        (
            2,
            2,
            {"k": (2, 2, -1, 32), "v": (2, 2, -1, 32), "q": (8, -1, 32), "mask": (2, 1, -1, -1)},
        ),
        # If every head has its own keys, the keys are transposed, and batch and heads share an axis.
        (1, 4, {"q": (4, -1, 32), "k": (4, 32, -1), "mask": (1, 1, -1, -1), "v": (4, -1, 32)}),
        (2, 4, {"q": (8, -1, 32), "k": (8, 32, -1), "mask": (2, 1, -1, -1), "v": (8, -1, 32)}),
        # There is no mask.
        (2, 2, {"k": (2, 2, -1, 32), "v": (2, 2, -1, 32), "q": (8, -1, 32)}),
        (2, 4, {"q": (8, -1, 32), "k": (8, 32, -1), "v": (8, -1, 32)}),
    ],
)
def test_attention_reads_the_past_and_the_new_keys(
    batch: int, heads: int, printed: dict[str, tuple[int, ...]]
) -> None:
    """The kernel that writes keys and values has many nodes, and the shapes of most nodes would fit keys and values,
    too."""
    queries, keys = (batch, 4, "length", 32), (batch, heads, JOINED, 32)
    read = [queries, keys, keys, *[(batch, 1, "length", JOINED)] * ("mask" in printed)]
    nodes = {
        "attend": Node([("x", queries)], [("y", queries)]),
        "attend_AttentionInput": Node([("", each) for each in read], [("x", queries)]),
        "past": Node([], [("past", (batch, heads, PAST, 32))]),
    }
    tensors = [KernelTensor(name, "Half", dims) for name, dims in printed.items()]
    attention = kernel(("attend",), *tensors, name="_gemm_mha_v2_myl1_5", o=(batch * 4, -1, 32))
    join = kernel(("attend", "past"), k=printed["k"], v=printed["v"])
    made, fused = resolve_sizes([join, attention], Shapes({}, nodes))
    named = {"q": ("length",), "k": (JOINED,), "v": (JOINED,), "mask": ("length", JOINED)}
    for each in (*made.outputs, *fused.inputs):
        assert tuple(dim for dim in each.dims if isinstance(dim, str)) == named[each.name]
        assert [d for d in each.dims if d in printed[each.name]] == [
            d for d in printed[each.name] if d != -1
        ]


def test_a_number_may_be_part_of_the_graph_s_own_name() -> None:
    assert "layer_0/linear" in graph_names("layer_0/linear.1_83_myl3")
    assert graph_names("layer_0/add_264_myl3")[1] == "layer_0/add_264"
    key = kernel(("cat",), new_key_0=(1, 2, -1, 32))
    nodes = {"cat": Node([], [("past", (1, 2, PAST, 32))])}
    (found,) = resolve_sizes([key], Shapes({"new_key_0": (1, 2, "length", 32)}, nodes))
    assert found.outputs[0].dims == (1, 2, "length", 32)


ROWS, CHOSEN = ("rows", 8), ("chosen", 8)


def gathered(others: dict[str, Node], written: Dims) -> tuple[Kernel, Shapes]:
    """Return a kernel with the builder's tensor names that gathers some rows: rows of `wide` if another node writes it,
    otherwise of `rows`."""
    wide = any(name == "wide" for each in others.values() for name, _ in each.outputs)
    source = "wide" if wide else "rows"
    gather = Node(
        [(source, ROWS), ("index", ("chosen",))], [("taken", CHOSEN)], [(source, ROWS, CHOSEN)]
    )
    inputs = KernelTensor("a_1", "Half", ROWS), KernelTensor("a_2", "Int64", ("chosen",))
    made = kernel(("gather", *others), *inputs, a_3=written)
    return made, Shapes({}, {"gather": gather, **others})


CAST = {"cast": Node([("rows", ROWS)], [("wide", ROWS)])}


@pytest.mark.parametrize(
    ("others", "written", "read"),
    [
        ({}, CHOSEN, "8*chosen"),
        # With a cast before the gather, still only the gathered rows are read.
        (CAST, CHOSEN, "8*chosen"),
        # If another node reads all rows, all rows count.
        ({"sum": Node([("rows", ROWS)], [("total", (1, 8))])}, CHOSEN, None),
        # The gathered tensor is computed in this kernel from two inputs of the same size, or the kernel writes it.
        ({"add": Node([("rows", ROWS), ("b", ROWS)], [("wide", ROWS)])}, CHOSEN, None),
        (CAST, ROWS, None),
    ],
)
def test_only_what_nothing_else_reads_or_writes_is_read_in_part(
    others: dict[str, Node], written: Dims, read: str | None
) -> None:
    made, shapes = gathered(others, written)
    (found,) = resolve_sizes([made], shapes)
    assert [each.read for each in found.inputs] == [read, None]
