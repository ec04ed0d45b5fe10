"""Predicts what experts would take if their slots were given in other ways, from the builder's kernel lists.

    python -m bench.slots /path/of/bench.predict/engines-fp8-4 --gpu rtx-5090

Prints milliseconds per denoising pass of the kernels that depend on the slots. Capacities per layer or per group of
experts are multiples of `pass_shapes.SLOT_UNIT`; products over sorted rows round up each expert's rows to as many. Nothing
is added for finding the sizes, nor for leaving the engine in between. The engines have three layers, and may have fewer
experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.predict import SEGMENTS
from canvasrt.bundle import load_bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.released import released_model
from canvasrt.defaults import LAYERS_PER_SEGMENT
from canvasrt.kernels.predict import Predictor, TimedKernel
from canvasrt.kernels.rates import GpuRates, find_gpu
from canvasrt.pass_shapes import SLOT_UNIT, capacities, round_up

LAYERS = SEGMENTS * LAYERS_PER_SEGMENT
GROUPS = 4
# Passes drawn per kind of routing.
DRAWS = 10
# Of a layer's experts: which fraction has how many slots, in the kernels that depend on it.
Shares = list[tuple[float, float]]
Loads = np.ndarray  # tokens by layer and expert


def even(model: ModelConfig, rng: np.random.Generator) -> Loads:
    """Every expert is as likely as any other."""
    return _routed(model, rng, np.zeros((LAYERS, model.num_experts)), model.canvas_length)


def skewed(model: ModelConfig, rng: np.random.Generator) -> Loads:
    """In each layer, experts differ in how likely they are, by a factor of e per standard deviation."""
    likely = rng.standard_normal((LAYERS, model.num_experts))
    return _routed(model, rng, likely, model.canvas_length)


def padded(model: ModelConfig, rng: np.random.Generator) -> Loads:
    """Half of the tokens are padding, which all goes to the same experts of a layer."""
    half = model.canvas_length // 2
    loads = _routed(model, rng, np.zeros((LAYERS, model.num_experts)), half)
    for layer in loads:
        layer[rng.choice(model.num_experts, model.top_k_experts, replace=False)] += half
    return loads


def _routed(model: ModelConfig, rng: np.random.Generator, likely: Loads, tokens: int) -> Loads:
    """Draw each token's experts without replacement: the best of `likely` plus Gumbel noise."""
    scores = likely[:, None] + rng.gumbel(size=(LAYERS, tokens, model.num_experts))
    chosen = np.argsort(-scores)[..., : model.top_k_experts]
    return (chosen[..., None] == np.arange(model.num_experts)).sum(axis=(1, 2))


def _units(load: float) -> int:
    return max(1, -(-int(load) // SLOT_UNIT)) * SLOT_UNIT


def one_size(model: ModelConfig, loads: Loads) -> list[Shares]:
    """As it is: one of a few sizes, for all layers."""
    return [[(1.0, round_up(int(loads.max()), capacities(model)))]] * LAYERS


def by_layer(model: ModelConfig, loads: Loads) -> list[Shares]:
    """A size per layer."""
    return [[(1.0, _units(layer.max()))] for layer in loads]


def by_group(model: ModelConfig, loads: Loads) -> list[Shares]:
    """A size per layer and group of experts, each of which has kernels of its own."""
    return [
        [(1 / GROUPS, _units(group.max())) for group in np.array_split(layer, GROUPS)]
        for layer in loads
    ]


def sorted_rows(model: ModelConfig, loads: Loads) -> list[Shares]:
    """Products of uneven sizes: each expert's rows, rounded up to whole tiles."""
    rows = -(-loads // SLOT_UNIT) * SLOT_UNIT
    return [[(1.0, layer.mean())] for layer in rows]


FORMS: dict[str, Callable[[ModelConfig, Loads], list[Shares]]] = {
    "one size, as it is": one_size,
    "per layer": by_layer,
    f"per layer and group, {GROUPS} groups": by_group,
    "sorted rows": sorted_rows,
}


class Predicted:
    """The kernels of a denoising pass that depend on the slots, in the released model's 30 layers."""

    def __init__(self, engines: Path, gpu: GpuRates, context: int) -> None:
        self._predictor = Predictor(load_bundle(engines, kind="engines", check=False))
        self._gpu, self._context, self._canvas = gpu, context, released_model().canvas_length
        # All that such a kernel moves and computes is proportional to the experts.
        self._experts = released_model().num_experts / self._predictor.model.num_experts
        # With so many slots, a gather of what tokens were given reads the same from all of them.
        pairs = zip(self._rows(self._canvas // 2), self._rows(self._canvas), strict=True)
        self._depends = [few.cost != many.cost for few, many in pairs]

    @cache  # noqa: B019 - one object per run
    def _rows(self, capacity: int) -> Sequence[TimedKernel]:
        return self._predictor.denoise(self._gpu, 1, self._context, capacity).rows

    def seconds(self, shares: list[Shares]) -> float:
        """Return the seconds of all layers with these shares of experts."""
        return sum(self._layer(index, each) for index, each in enumerate(shares))

    def _layer(self, index: int, shares: Shares) -> float:
        """Return one layer's seconds. Of the three built, the second stands for all sliding ones."""
        built = 2 if (index + 1) % LAYERS_PER_SEGMENT == 0 else 1
        return sum(
            self._kernel(number, part, slots)
            for part, slots in shares
            for number, row in enumerate(self._rows(SLOT_UNIT))
            if self._depends[number] and row.place.layer == built
        )

    def _kernel(self, number: int, part: float, slots: float) -> float:
        """Return one kernel's seconds for a part of the experts; between whole numbers of slots, it is interpolated."""
        low = min(int(slots), self._canvas - 1)
        few, many = (self._rows(each)[number].cost for each in (low, low + 1))
        more, scale = slots - low, part * self._experts
        moved = few.moved + more * (many.moved - few.moved)
        operations = few.operations + more * (many.operations - few.operations)
        return self._gpu.seconds(scale * moved, scale * operations, few.format)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.slots", description=__doc__.splitlines()[0])
    parser.add_argument("engines", type=Path, help="engines of three layers, from bench.predict")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args(arguments)
    predicted = Predicted(options.engines, find_gpu(options.gpu), options.context)
    model = released_model()
    routings = (even, skewed, padded)
    print(f"| slots | {' | '.join(each.__name__ for each in routings)} |")
    print("| --- |" + " ---: |" * len(routings))
    for name, form in FORMS.items():
        cells = []
        for routing in routings:
            rng = np.random.default_rng(0)
            drawn = [form(model, routing(model, rng)) for _ in range(DRAWS)]
            cells.append(f"{1e3 * np.mean([predicted.seconds(each) for each in drawn]):.1f}")
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
