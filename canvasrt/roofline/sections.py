"""A prediction as text and tables, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from canvasrt.pages import section, table_of
from canvasrt.roofline.report import rows_text
from canvasrt.types import Json

# Number of kernels to list. Equal kernels of different layers are one row.
_LARGEST = 12


def heading(data: Json) -> list[str]:
    """Return lines that describe the prediction and the GPU."""
    gpu, sizes = data["gpu"], data["sizes"]
    source = f"measured on {gpu['measured']}" if gpu["measured"] else gpu["source"]
    shared = " (serve with --share-passes)" if sizes["batch"] > 1 else ""
    return [
        data["note"],
        *([data["foreign"]] if data["foreign"] else []),
        f"{gpu['name']}: {gpu['reached'] * gpu['bandwidth'] / 1e9:,.0f} GB/s reached of"
        f" {gpu['bandwidth'] / 1e9:,.0f}, {gpu['arithmetic']:.0%} of "
        + ", ".join(f"{rate / 1e12:,.0f} T {name}" for name, rate in gpu["rates"].items())
        + f", {gpu['launch'] * 1e6:.1f} µs per launch ({source})",
        f"batch {sizes['batch']} in passes of {sizes['rows']}{shared}, context {sizes['context']}",
        f"a block of {data['block']['steps']} steps and its encoding: {data['block']['ms']:.1f} ms,"
        f" {data['block']['tokens_per_second']:,.0f} tokens per second",
    ]


def sections(data: Json, drawn: Mapping[str, str] = MappingProxyType({})) -> Iterator[Json]:
    """Yield the sections about both passes, and about how the time of a denoising pass grows. `drawn` maps names to
    plots."""
    experts = data["sizes"]["experts"]
    for kind, made in data["passes"].items():
        note = _pass_note(made, experts)
        yield section(f"A pass: {kind}", note, drawn.get(kind), [_groups(made)])
        yield section(f"Segments, {kind}", tables=[_segments(made)], last_is_total=True)
        yield section(f"Largest kernels, {kind}", tables=[_largest(made["each"])])
    for by, grown in data["growth"].items():
        if len(grown) > 1:
            tables = [_growth(grown, by, experts)]
            yield section(f"A denoising pass by {by}", "", drawn.get(by), tables)


def _pass_note(made: Json, experts: str) -> str:
    sizes = made["sizes"]
    ours = f" {made['ours']} of them are canvasrt's own, between engines." if made["ours"] else ""
    return (
        f"{sizes['batch']} × {sizes['length']} tokens, {rows_text(experts, sizes['capacity'])}:"
        f" {made['ms']:.2f} ms and {made['kernels']} kernels; the floor is {made['floor_ms']:.2f} ms, so the pass"
        f" takes {made['ms'] / made['floor_ms']:.2f} times that.{ours}"
    )


def _growth(grown: list[Json], by: str, experts: str) -> Any:
    columns = {
        by: lambda each: f"{each[by]:,}",
        "experts": lambda each: rows_text(experts, each["capacity"]),
        "ms": lambda each: f"{each['ms']:.3g}",
        "floor, ms": lambda each: f"{each['floor_ms']:.3g}",
        "times the floor": lambda each: f"{each['ms'] / each['floor_ms']:.2f}",
    }
    return table_of(grown, columns)


def _groups(made: Json) -> Any:
    """Return the table by kind of layer and part of the network."""

    def per_layer(name: str) -> Any:
        return lambda each: each[name] / each["count"]

    kernels, moved, operations = (per_layer(name) for name in ("kernels", "bytes", "operations"))
    columns = {
        "where": lambda each: (
            f"{each['layers']} layers, {each['count']}" if each["layers"] else "other"
        ),
        "part": lambda each: each["part"],
        "kernels per layer": lambda each: f"{kernels(each):.3g}",
        "formats": lambda each: " ".join(each["formats"]),
        "MB per layer": lambda each: f"{moved(each) / 1e6:,.2f}",
        "Gop per layer": lambda each: f"{operations(each) / 1e9:,.1f}",
        "ms": lambda each: f"{each['ms']:.3f}",
        "share": lambda each: f"{each['ms'] / made['ms']:.1%}",
    }
    return table_of(made["groups"], columns)


def _segments(made: Json) -> Any:
    """Return the table of segments, with their sum in the last row."""
    sums = {name: sum(each[name] for each in made["segments"]) for name in _SUMMED}
    columns = {
        "segment": lambda each: each["segment"],
        "kernels": lambda each: each["kernels"],
        "formats": lambda each: " ".join(each["formats"]),
        "MB": lambda each: f"{each['bytes'] / 1e6:,.2f}",
        "Gop": lambda each: f"{each['operations'] / 1e9:,.1f}",
        "ms": lambda each: f"{each['ms']:.3f}",
    }
    return table_of([*made["segments"], {"segment": "all", "formats": [], **sums}], columns)


_SUMMED = ("kernels", "bytes", "operations", "ms")


def _largest(kernels: list[Json]) -> Any:
    """Return the table of the slowest kernels. Equal kernels of different layers are one row."""
    alike: dict[tuple[str, str], list[Json]] = {}
    for each in kernels:
        what = each["steps"] or _without_numbers(each)
        alike.setdefault((what, each["part"]), []).append(each)

    def total(of: list[Json], name: str) -> float:
        return sum(each[name] for each in of)

    slowest = sorted(alike.items(), key=lambda item: -total(item[1], "us"))[:_LARGEST]
    columns = {
        "kernel": lambda row: row[0][0] if len(row[0][0]) < 60 else f"{row[0][0][:57]}…",
        "part": lambda row: row[0][1],
        "kernels": lambda row: len(row[1]),
        "formats": lambda row: " ".join(
            sorted({form for each in row[1] for form in _formats(each)})
        ),
        "MB each": lambda row: f"{total(row[1], 'bytes') / len(row[1]) / 1e6:,.2f}",
        "Gop each": lambda row: f"{total(row[1], 'operations') / len(row[1]) / 1e9:,.1f}",
        "ms": lambda row: f"{total(row[1], 'us') / 1e3:.3f}",
    }
    return table_of(slowest, columns)


def _formats(kernel: Json) -> set[str]:
    """Return a product's format; for any other kernel, the dtypes that it writes."""
    return {kernel["runs_in"]} if kernel["runs_in"] else {dtype for dtype, _ in kernel["out"]}


def _without_numbers(kernel: Json) -> str:
    """Return a name for a kernel that Myelin did not name: its kind, and its first node's module without numbers."""
    module = kernel["nodes"][0].rpartition("/")[0] if kernel["nodes"] else kernel["kind"]
    words = [word for word in module.split(".") if not word.isdigit() and word != "layers"]
    return f"{kernel['kind']} {'.'.join(words)}"
