"""The kernels of engines with the released widths: their formats, their number and the bytes they move.

The engines are built from graphs of `bench.shape`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from bench.shape import WIDTHS
from canvasrt.bundle import Bundle
from canvasrt.defaults import FOLDED_HEADS, SORTED
from canvasrt.pass_shapes import BLOCK_ROWS
from canvasrt.recipes.recipe import load_recipe
from canvasrt.roofline import cost, group, store
from canvasrt.roofline.dims import UNKNOWN, volume
from canvasrt.roofline.parse import Kernel
from tests.canvasrt.roofline.conftest import Released

# All RTX capabilities and all recipes occur, and an engine for several capabilities. So far, a recipe has the same
# kernels on every capability, so one or two targets per recipe are enough.
TARGETS = [
    ("bf16", "rtx-3090"),
    *(("int4", target) for target in ("rtx-4090", "rtx")),
    ("fp8", "rtx-4090"),
    ("nvfp4", "rtx-5090"),
    ("nvfp4-mixed", "rtx-5090"),
    ("int4-mixed", "rtx-4090"),
    ("nvfp4-experts", "dgx-spark"),
    ("int4", "rtx-4090", SORTED),
    ("fp8", "rtx-pro-6000", SORTED),
    ("nvfp4", "rtx-5090", SORTED),
]
# Number format → the dtype of stored weights, and the format in which they are multiplied.
PRODUCTS = {
    None: ("BFloat16", "bf16"),
    "fp8": ("FP8", "fp8"),
    "nvfp4": ("FP4E2M1", "fp4"),
    "int4": ("Int4", "bf16"),
    "int8": ("Int8", "bf16"),
}
SLIDING, FULL = 1, 2
D, MLP, INNER, E = 2816, 2112, 704, WIDTHS["num_experts"]
SHARED = {
    "mlp.gate_up": (D, 2 * MLP),
    "mlp.down": (MLP, D),
    "experts.gate_up": (E, D, 2 * INNER),
    "experts.down": (E, INNER, D),
    "router.proj": (D, E),
}
MATRICES = {
    SLIDING: {"attention.qkv": (D, 8192), "attention.o": (4096, D)} | SHARED,
    FULL: {"attention.qkv": (D, 9216), "attention.o": (8192, D)} | SHARED,
}
HEAD = {"table": (D, WIDTHS["vocab_size"])} | {
    f"signal_mlp.{name}": SHARED[f"mlp.{name}"] for name in ("gate_up", "down")
}
SIZES = {
    "batch": 1,
    "length": 256,
    "octets_sliding": 128,
    "octets_full": 128,
    "capacity": 64,
    "gate_rows": 64,
    "gate_queues": E,
    # It is assumed that half of every expert's last block is empty.
    "routed_rows": 256 * WIDTHS["top_k_experts"],
    "sorted_rows": 256 * WIDTHS["top_k_experts"] + E * BLOCK_ROWS // 2,
}
# Four canvases have four times as many slots and rows. A short encoding pass has one slot per token.
SIZES_BY_PROGRAM = {
    "denoise": SIZES,
    "denoise_batch": SIZES
    | {"batch": 4, "capacity": 256, "gate_rows": 256}
    | {"routed_rows": 4 * 256 * WIDTHS["top_k_experts"]}
    | {"sorted_rows": 4 * 256 * WIDTHS["top_k_experts"] + E * BLOCK_ROWS // 2},
    "encode": SIZES | {"capacity": 256, "gate_rows": 256},
}
# Sizes of an axis of tokens: of a canvas, of a canvas for two heads of a group, and of a full batch.
TOKENS = {256, 2 * 256, 4 * 256}
LIMITS = Path(__file__).with_name("limits.json")


pytestmark = pytest.mark.acceptance


@pytest.fixture(params=TARGETS, ids="-".join)
def built(request: pytest.FixtureRequest, released: Released) -> Bundle:
    return released(*request.param)


def programs(bundle: Bundle, segment: str = "body_0") -> dict[str, Sequence[Kernel]]:
    entry = next(each for each in bundle.manifest.segments if each["name"] == segment)
    return dict(store.read(bundle.file(entry["kernels"])))


def of_layer(kernels: Sequence[Kernel], layer: int) -> list[tuple[Kernel, group.Place]]:
    pairs = [(kernel, group.place_of(kernel, "body_0", range(3))) for kernel in kernels]
    return [(kernel, place) for kernel, place in pairs if place.layer == layer]


def all_programs(bundle: Bundle) -> Iterator[tuple[str, str, Sequence[Kernel]]]:
    for segment in ("body_0", "head"):
        for profile, kernels in programs(bundle, segment).items():
            yield segment, profile, kernels


def test_every_profile_has_its_kernels_and_every_size_a_name(built: Bundle) -> None:
    for entry in built.manifest.segments:
        found = programs(built, entry["name"])
        assert set(found) == {profile["name"] for profile in entry["profiles"]}
    for segment, profile, kernels in all_programs(built):
        assert len(kernels) > 15
        unknown = [each.name for k in kernels for each in k.tensors if UNKNOWN in each.dims]
        assert not unknown, (segment, profile, unknown)


def test_what_is_read_is_what_was_written_or_an_even_part_of_it(built: Bundle) -> None:
    """With odd sizes, a dimension that is mistaken for another changes a tensor's volume."""
    odd = {"batch": 3, "length": 131, "octets_sliding": 39, "octets_full": 97, "capacity": 61}
    odd |= {"gate_rows": 61, "gate_queues": E, "routed_rows": 59, "sorted_rows": 67}
    for segment, profile, kernels in all_programs(built):
        sizes = odd | ({} if profile == "encode" else {"length": 256})
        sizes |= {"batch": 1} if profile == "denoise" else {}
        written: dict[str, int] = {}
        for kernel in kernels:
            for each in kernel.inputs:
                if each.name in written and each.read is None:
                    count = volume(each.dims, sizes)
                    assert written[each.name] % count == 0, (segment, profile, kernel.name, each)
            for each in kernel.outputs:
                written[each.name] = volume(each.dims, sizes)


def recipe_name(bundle: Bundle) -> str:
    """Return the recipe's name, or bf16."""
    return (bundle.manifest.options.get("recipe") or {"name": "bf16"})["name"]


def choices(bundle: Bundle) -> dict[str, str]:
    """Return the format of each quantized weight in the recipe."""
    recipe = recipe_name(bundle)
    if recipe == "bf16":
        return {}
    chosen = load_recipe(recipe).formats(bundle.manifest.model)
    return {name: choice.format for name, choice in chosen.items()}


def products(kernels: Sequence[Kernel]) -> dict[tuple[int, ...], list[tuple[str, str]]]:
    """Return products by the shape of the weight: the weight's dtype and the product's format."""
    found: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for kernel in kernels:
        matrix = cost.weight(kernel)
        if cost.is_product(kernel) and matrix is not None:
            shape = tuple(int(d) for d in matrix.dims if d != 1)
            found.setdefault(shape, []).append((matrix.dtype, cost.product_format(kernel)))
    return found


def test_every_weight_is_multiplied_once_in_its_recipe_s_format(built: Bundle) -> None:
    formats = choices(built)
    for profile, kernels in programs(built).items():
        for layer, matrices in MATRICES.items():
            wanted = {
                shape: [PRODUCTS[formats.get(f"layers.{layer}.{name}")]]
                for name, shape in matrices.items()
            }
            inside = [kernel for kernel, _ in of_layer(kernels, layer)]
            assert products(inside) == wanted, (profile, layer)


def test_the_head_multiplies_by_the_table_twice_in_its_recipe_s_format(built: Bundle) -> None:
    formats = choices(built)
    wanted = PRODUCTS[formats.get("table")]
    vocabulary = WIDTHS["vocab_size"]
    for profile, kernels in programs(built, "head").items():
        found = products(kernels)
        assert found[D, vocabulary] + found[vocabulary, D] == [wanted, wanted], profile
        # Self-conditioning has a separate MLP.
        for name in ("signal_mlp.gate_up", "signal_mlp.down"):
            assert found[HEAD[name]] == [PRODUCTS[formats.get(name)]], (profile, name)


def test_no_kernel_writes_a_weight(built: Bundle) -> None:
    """No output has as many elements as a matrix of a layer or of the head, except the small router's matrix. Outputs
    without an axis of tokens are smaller than an eighth of the smallest matrix."""
    shapes = {shape for matrices in (*MATRICES.values(), HEAD) for shape in matrices.values()}
    sizes = {prod(shape) for shape in shapes - {SHARED["router.proj"]}}
    for segment, profile, kernels in all_programs(built):
        for kernel in kernels:
            for each in kernel.outputs:
                if all(isinstance(dim, int) for dim in each.dims):
                    where = segment, profile, kernel.name, each
                    count = volume(each.dims, {})
                    assert count not in sizes, where
                    assert TOKENS & set(each.dims) or count < min(sizes) / 8, where


def test_softmaxes_are_computed_in_fp32(built: Bundle) -> None:
    """The router computes in fp32. For heads of 512, scores are widened to fp32, and their maximum and sum are fp32."""
    for profile, kernels in programs(built).items():
        inside = [k for k, _ in of_layer(kernels, FULL)]
        assert not [k.name for k in outside(kernels) if "Exp" in cost.step_names(k)], profile
        exp = f"layers.{FULL}.router/node_exp"
        (router,) = [k for k in inside if any(node.startswith(exp) for node in k.nodes)]
        top = [each.dtype for each in router.inputs if each.dims[-1] == WIDTHS["top_k_experts"]]
        # The integers are indices of experts.
        assert set(top) - {"Int32", "Int64"} == {"Float"}, (profile, top)
        attention = [k for k in inside if "Exp" in cost.step_names(k) and k is not router]
        # Every piece has two such kernels, one over the cached keys and one over the new keys. Further kernels merge
        # results.
        assert len(attention) >= 2 * pieces(built), profile
        for kernel in attention:
            steps = re.findall("[A-Z][a-z]+", cost.step_names(kernel))
            assert "Cast" in steps[: steps.index("Exp")], (profile, kernel.name)
            # This excludes the zero that links the pieces, which has one number per request.
            ones = [each for each in kernel.tensors if each.dims[-1] == 1]
            sums = [each for each in ones if volume(each.dims, SIZES | {"batch": 4}) > 4]
            assert sums, (profile, kernel.name)
            assert {each.dtype for each in sums} == {"Float"}, (profile, kernel.name)


def outside(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels that belong to no layer."""
    found = [group.place_of(kernel, "body_0", range(3)) for kernel in kernels]
    return [kernel for kernel, place in zip(kernels, found, strict=True) if place.layer is None]


def pieces(bundle: Bundle) -> int:
    """Return the number of pieces of a full layer's attention."""
    model = bundle.manifest.model
    return -(-model.num_attention_heads // model.layers[FULL].num_kv_heads // FOLDED_HEADS)


def longest_chain(kernels: Sequence[Kernel]) -> int:
    """Return the length of the longest chain of products without a weight, which are attention's products."""
    depth: dict[str, int] = {}
    for kernel in kernels:
        own = cost.is_product(kernel) and cost.weight(kernel) is None
        reached = max((depth.get(each.name, 0) for each in kernel.inputs), default=0) + own
        for each in kernel.outputs:
            depth[each.name] = max(reached, depth.get(each.name, 0))
    return max(depth.values())


def test_attention_with_heads_of_512_runs_piece_by_piece(built: Bundle) -> None:
    """To run after the previous piece, a piece reads its result times a zero. The zero comes from the mask, so that no
    builder can fold it. If it were folded, the scores of all pieces would be in memory at once.

    A chain through two pieces has four products: scores and values of each piece.
    """
    count = pieces(built)
    for profile, kernels in programs(built).items():
        inside = [k for k, place in of_layer(kernels, FULL) if place.part == group.ATTENTION]
        assert longest_chain(inside) == 2 * count, profile
        # Without the dependency of queries on the previous piece, chains are shorter. So the builder did not fold the
        # zero.
        own = [k for k in inside if cost.is_product(k) and cost.weight(k) is None]
        cut = [replace(k, inputs=k.inputs[1:]) if k in own else k for k in inside]
        assert longest_chain(cut) < 2 * count, profile


def test_attention_with_heads_of_256_is_one_kernel(built: Bundle) -> None:
    for profile, kernels in programs(built).items():
        inside = [k for k, place in of_layer(kernels, SLIDING) if place.part == group.ATTENTION]
        (fused,) = [each for each in inside if cost.is_attention(each)]
        assert fused.inputs[2].dims[-1] == 256, profile
        assert not [k.name for k in inside if cost.is_product(k) and cost.weight(k) is None]


def pair_of(bundle: Bundle) -> str:
    """Return the key in `limits.json`: recipe, compute capability, and the form of the experts unless it is the
    default."""
    target, experts = bundle.manifest.target, bundle.manifest.options.get("experts")
    assert target is not None
    return ", ".join([recipe_name(bundle), target["compute_capability"], *filter(None, [experts])])


def measured(bundle: Bundle) -> dict[str, Any]:
    """Return by place and program: the number of kernels, and the megabytes that products and other kernels move."""
    bodies, head = programs(bundle), programs(bundle, "head")
    found: dict[str, Any] = {}
    for name, layer in (("sliding layer", SLIDING), ("full layer", FULL)):
        inside = {p: [kernel for kernel, _ in of_layer(ks, layer)] for p, ks in bodies.items()}
        found[name] = {p: [len(ks), *moved(bodies[p], ks, p)] for p, ks in inside.items()}
    found["segment"] = {p: [len(ks)] for p, ks in bodies.items()}
    found["head"] = {p: [len(ks), *moved(ks, ks, p)] for p, ks in head.items()}
    return found


def moved(kernels: Sequence[Kernel], inside: Sequence[Kernel], program: str) -> list[float]:
    """Return the megabytes that the kernels `inside` move: first the products, then all others."""
    if program not in SIZES_BY_PROGRAM:
        return []
    # Kernels are identified by object, since names repeat in the engines of pieces.
    chosen = {id(kernel) for kernel in inside}
    found = {True: 0.0, False: 0.0}
    for kernel, each in zip(kernels, cost.costs(kernels, SIZES_BY_PROGRAM[program]), strict=True):
        if id(kernel) in chosen:
            found[each.is_product] += each.moved / 1e6
    return [round(total, 1) for total in found.values()]


def test_kernels_and_bytes_stay_within_their_limits(built: Bundle) -> None:
    """`limits.json` has the current figures. If a figure falls by more than 5%, the test demands the lower limit, so
    that it cannot rise again unnoticed."""
    limits = json.loads(LIMITS.read_text())[pair_of(built)]
    found = measured(built)
    assert {where: set(held) for where, held in limits.items()} == {
        where: set(held) for where, held in found.items()
    }
    for where, held in limits.items():
        for program, limit in held.items():
            value = found[where][program]
            for now, most in zip(value, limit, strict=True):
                assert now <= most, f"{where}, {program}: {value} is more than {limit}"
                assert now >= 0.95 * most - 1, f"{where}, {program}: lower {limit} to {value}"
