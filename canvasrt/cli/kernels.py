"""What `canvasrt inspect --kernels` prints: the kernels of an engine bundle and their predicted times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from canvasrt.console import emit, size, table
from canvasrt.defaults import SLOTTED
from canvasrt.errors import UsageError
from canvasrt.targets import TARGETS
from canvasrt.types import Json

# How many kernels to list; equal ones of different layers count once.
_LARGEST = 12


def show(
    bundle: Any,
    batch: int,
    context: int,
    capacity: int | None,
    gpu: str | None,
    measured: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Predict the passes of a bundle and print them; with `page`, write them as a page too."""
    from canvasrt.kernels import rates
    from canvasrt.kernels.predict import Predictor
    from canvasrt.kernels.report import prediction_report

    predictor = Predictor(bundle)
    if capacity is not None and predictor.experts != SLOTTED:
        raise UsageError(
            "--capacity has no effect: the bundle's experts have sorted rows, not slots",
            "leave --capacity out",
        )
    if capacity is not None:
        predictor.check_capacity(batch, capacity)
    target = bundle.manifest.target or {}
    found = rates.find_gpu(gpu or _usual_gpu(target))
    if measured is not None:
        found = rates.measured(found, measured)
    data = prediction_report(predictor, found, batch, context, capacity)
    if page is not None:
        from canvasrt.kernels.kernels_page import write_page

        write_page(data, bundle.path.resolve().name, page)

    def render(console: Any) -> None:
        for line in _heading(data):
            console.print(line, markup=False)
        for kind, made in data["passes"].items():
            _show_pass(console, kind, made, data["sizes"]["experts"])
        block = data["block"]
        console.print(
            f"\na block of {block['steps']} steps and its encoding: {block['ms']:.1f} ms,"
            f" {block['tokens_per_second']:,.0f} tokens per second",
            markup=False,
        )
        if page is not None:
            console.print(f"page: {page / 'kernels.html'}", markup=False)

    emit(data, as_json, render)


def _usual_gpu(target: Json) -> str:
    """Return the GPU to predict for: of a target with several capabilities, one with the first."""
    from canvasrt.kernels.rates import GPUS

    name, capabilities = target.get("name", ""), target.get("compute_capability", "")
    if name in GPUS:
        return name
    first = capabilities.partition(",")[0]
    alike = [each.name for each in TARGETS if each.capability_text == first and each.name in GPUS]
    return alike[0] if alike else name


def _heading(data: Json) -> list[str]:
    gpu, sizes = data["gpu"], data["sizes"]
    source = f"measured on {gpu['measured']}" if gpu["measured"] else gpu["source"]
    shared = " (serve with --share-passes)" if sizes["batch"] > 1 else ""
    return [
        data["note"],
        *([data["foreign"]] if data["foreign"] else []),
        "",
        f"{gpu['name']}: {gpu['reached'] * gpu['bandwidth'] / 1e9:,.0f} GB/s reached of"
        f" {gpu['bandwidth'] / 1e9:,.0f}, {gpu['arithmetic']:.0%} of "
        + ", ".join(f"{rate / 1e12:,.0f} T {name}" for name, rate in gpu["rates"].items())
        + f", {gpu['launch'] * 1e6:.1f} µs per launch ({source})",
        f"batch {sizes['batch']} in passes of {sizes['rows']}{shared}, context {sizes['context']}",
    ]


def _show_pass(console: Any, kind: str, made: Json, experts: str) -> None:
    sizes = made["sizes"]
    slots = "rows sorted by expert"
    if experts == SLOTTED:
        slots = f"{sizes['capacity']} slots per expert"
    console.print(
        f"\n{kind}, {sizes['batch']} × {sizes['length']} tokens, {slots}: {made['ms']:.2f} ms and {made['kernels']} kernels; the floor is"
        f" {made['floor_ms']:.2f} ms, so the pass takes {made['ms'] / made['floor_ms']:.2f} times that",
        markup=False,
    )
    if made["ours"]:
        console.print(f"{made['ours']} of them are canvasrt's own, between engines", markup=False)
    rows = [
        (
            f"{each['layers']} layers, {each['count']}" if each["layers"] else "other",
            each["part"],
            *_cells(each, each["count"]),
            f"{each['ms'] / made['ms']:.1%}",
        )
        for each in made["groups"]
    ]
    heads = (
        "where",
        "part",
        "kernels per layer",
        "formats",
        "bytes per layer",
        "Gop per layer",
        "ms",
        "",
    )
    console.print(table(heads, rows))
    console.print()
    rows = [(each["segment"], *_cells(each, 1)) for each in made["segments"]]
    console.print(table(("segment", "kernels", "formats", "bytes", "Gop", "ms"), rows))
    console.print()
    columns = ("largest", "part", "kernels", "formats", "bytes each", "Gop each", "ms")
    console.print(table(columns, largest(made["each"])))


def _cells(each: Json, count: int) -> tuple[str, ...]:
    return (
        f"{each['kernels'] / count:.3g}",
        " ".join(each["formats"]),
        size(each["bytes"] / count),
        f"{each['operations'] / count / 1e9:,.1f}",
        f"{each['ms']:.3f}",
    )


def largest(rows: list[Json]) -> list[tuple[str, ...]]:
    """Return the slowest kernels; equal ones of different layers are one row."""
    found: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        what = row["steps"] or _without_numbers(row)
        found.setdefault((what, row["part"]), []).append(row)
    order = sorted(found.items(), key=lambda item: -sum(row["us"] for row in item[1]))
    return [
        (
            what if len(what) < 60 else f"{what[:57]}…",
            part,
            str(len(held)),
            " ".join(sorted({each for row in held for each in _formats(row)})),
            size(sum(row["bytes"] for row in held) / len(held)),
            f"{sum(row['operations'] for row in held) / len(held) / 1e9:,.1f}",
            f"{sum(row['us'] for row in held) / 1e3:.3f}",
        )
        for (what, part), held in order[:_LARGEST]
    ]


def _formats(row: Json) -> set[str]:
    """Return what a product runs in; of other kernels, what they write."""
    return {row["runs_in"]} if row["runs_in"] else {dtype for dtype, _ in row["out"]}


def _without_numbers(row: Json) -> str:
    """Return the module of a kernel's first node, for kernels that Myelin did not name."""
    module = row["nodes"][0].rpartition("/")[0] if row["nodes"] else row["kind"]
    words = [word for word in module.split(".") if not word.isdigit() and word != "layers"]
    return f"{row['kind']} {'.'.join(words)}"
