"""A prediction as plain data, which `canvasrt inspect --kernels` prints, writes as JSON and draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import SLOTTED
from canvasrt.errors import UsageError
from canvasrt.roofline.cost import BITS, is_own, product_format, step_names, weight
from canvasrt.roofline.group import PARTS
from canvasrt.roofline.predict import PREDICTED_STEPS, PredictedPass, Predictor, TimedKernel
from canvasrt.roofline.rates import GpuRates, name_of
from canvasrt.targets import find_target
from canvasrt.types import Json

_NOTE = (
    "A prediction, not a measurement. A kernel takes as long as moving its bytes or computing its operations, whichever"
    " is longer, plus a launch. Kernels run one after another, and caches are ignored."
)
BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (1024, 4096, 16_384, 32_768, 65_536, 131_072, 262_144)


def prediction_report(
    predictor: Predictor, gpu: GpuRates, batch: int, context: int, capacity: int | None = None
) -> Json:
    """Return the predicted denoising and encoding pass at these sizes, and denoising passes at other batches and
    contexts. Times are in milliseconds.

    Passes at other batches have the batch's usual capacity. Passes at other contexts have `capacity`.
    """
    denoise = predictor.denoise(gpu, batch, context, capacity)
    encode = predictor.encode(gpu, context)
    block = predictor.block_seconds(gpu, batch, context, capacity)
    return {
        "note": _NOTE,
        "foreign": _foreign(predictor, gpu),
        "gpu": {**asdict(gpu), "rates": dict(gpu.rates)},
        "sizes": {
            **asdict(denoise.sizes),
            "batch": batch,
            "rows": denoise.sizes.batch,
            "experts": predictor.experts,
        },
        "passes": {each.kind: _pass(each, predictor.model) for each in (denoise, encode)},
        "block": {
            "steps": PREDICTED_STEPS,
            "ms": 1e3 * block,
            "tokens_per_second": batch * predictor.model.canvas_length / block,
        },
        "growth": {
            "batch": _growth(predictor, gpu, [(each, context, None) for each in BATCHES]),
            "context": _growth(predictor, gpu, [(batch, each, capacity) for each in CONTEXTS]),
        },
    }


def rows_text(experts: str, capacity: int) -> str:
    """Return text about how many rows the experts compute in a pass."""
    return f"{capacity} slots per expert" if experts == SLOTTED else "rows sorted by expert"


def _foreign(predictor: Predictor, gpu: GpuRates) -> str:
    """Return a warning if the engines do not run on `gpu`; else an empty string."""
    own = predictor.capabilities
    there = find_target(name_of(gpu)).capability_text
    if not own or there in own.split(", "):
        return ""
    return (
        f"These engines are for compute capability {own} and do not run on {gpu.name}, which has {there}. Engines for"
        " that GPU may have other kernels."
    )


def _pass(made: PredictedPass, model: ModelConfig) -> Json:
    return {
        "sizes": asdict(made.sizes),
        "ms": 1e3 * made.seconds,
        "floor_ms": 1e3 * made.floor_seconds,
        "kernels": len(made.rows),
        "ours": sum(is_own(row.kernel) for row in made.rows),
        "segments": _named_sums(made.rows, [row.segment for row in made.rows], "segment"),
        "parts": sorted(
            _named_sums(made.rows, [row.place.part for row in made.rows], "part"),
            key=lambda each: PARTS.index(each["part"]),
        ),
        "groups": _groups(made.rows, model),
        "each": [_row(row) for row in made.rows],
    }


def _named_sums(rows: Sequence[TimedKernel], names: Sequence[str], key: str) -> list[Json]:
    found: dict[str, list[TimedKernel]] = {}
    for row, name in zip(rows, names, strict=True):
        found.setdefault(name, []).append(row)
    return [{key: name, **_sum(held)} for name, held in found.items()]


def _groups(rows: Sequence[TimedKernel], model: ModelConfig) -> list[Json]:
    """Return sums over the kernels of each part of the network, separately for sliding layers, full layers and the
    rest."""
    found: dict[tuple[str, str], list[TimedKernel]] = {}
    layers: dict[str, set[int]] = {}
    for row in rows:
        index = row.place.layer
        kind = "" if index is None else model.layers[index].kind
        if index is not None:
            layers.setdefault(kind, set()).add(index)
        found.setdefault((kind, row.place.part), []).append(row)
    order = sorted(
        found, key=lambda key: (["sliding", "full", ""].index(key[0]), PARTS.index(key[1]))
    )
    return [
        {
            "layers": kind,
            "count": len(layers.get(kind, ())) or 1,
            "part": part,
            **_sum(found[kind, part]),
        }
        for kind, part in order
    ]


def _sum(rows: Iterable[TimedKernel]) -> Json:
    rows = list(rows)
    return {
        "kernels": len(rows),
        "formats": formats(rows),
        "bytes": sum(row.cost.moved for row in rows),
        "operations": sum(row.cost.operations for row in rows),
        "ms": 1e3 * sum(row.seconds for row in rows),
    }


def formats(rows: Iterable[TimedKernel]) -> list[str]:
    """Return the formats in which these kernels' products run. If none is a product, return the dtypes that they
    write."""
    rows = list(rows)
    products = {_runs_in(row) for row in rows if row.cost.is_product}
    return sorted(products or {each.dtype for row in rows for each in row.kernel.outputs})


def _runs_in(row: TimedKernel) -> str:
    """Return a product's format; for a weight that is converted first, both formats: `int4→bf16`."""
    stored = weight(row.kernel)
    widened = stored is not None and BITS[stored.dtype] < 16 and row.cost.format == "bf16"
    return f"{stored.dtype.lower()}→bf16" if stored and widened else row.cost.format


def _row(row: TimedKernel) -> Json:
    kernel = row.kernel
    return {
        "segment": row.segment,
        "layer": row.place.layer,
        "part": row.place.part,
        "name": kernel.name,
        "kind": kernel.kind,
        "ours": is_own(kernel),
        "steps": step_names(kernel),
        "format": product_format(kernel) if row.cost.is_product else None,
        "runs_in": _runs_in(row) if row.cost.is_product else None,
        "in": [[each.dtype, list(each.dims)] for each in (*kernel.inputs, *kernel.constants)],
        "out": [[each.dtype, list(each.dims)] for each in kernel.outputs],
        "bytes": row.cost.moved,
        "operations": row.cost.operations,
        "us": 1e6 * row.seconds,
        "nodes": list(kernel.nodes),
    }


def _growth(
    predictor: Predictor, gpu: GpuRates, sizes: Iterable[tuple[int, int, int | None]]
) -> list[Json]:
    """Return denoising passes at these sizes, except sizes that fit no profile and batches that would be padded."""
    found = []
    for batch, context, capacity in sizes:
        try:
            made = predictor.denoise(gpu, batch, context, capacity)
        except UsageError:
            continue
        if made.sizes.batch != batch:
            continue
        found.append(
            {
                "batch": batch,
                "context": context,
                "capacity": made.sizes.capacity,
                "ms": 1e3 * made.seconds,
                "floor_ms": 1e3 * made.floor_seconds,
                "parts": {part: 1e3 * value for part, value in made.parts().items()},
            }
        )
    return found
