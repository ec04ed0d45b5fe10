"""`canvasrt quantize`: quantizes graphs by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from canvasrt.cli import options
from canvasrt.console import emit, progress, size
from canvasrt.recipes import SHIPPED

if TYPE_CHECKING:
    from canvasrt.bundle import Bundle

Graphs = Annotated[
    Path,
    options.argument(
        "GRAPHS",
        "A folder that `canvasrt export` wrote: in bf16 for GPUs and CPUs, in fp32 for CPUs only.",
    ),
]
Recipe = Annotated[
    str,
    options.option(
        "--precision, -p",
        "NAME|FILE",
        f"A recipe: {', '.join(SHIPPED)}, or a YAML file with your own recipe.",
    ),
]


def quantize(
    graphs: Graphs,
    precision: Recipe,
    out: options.Out,
    calibration: options.Calibration = None,
    as_json: options.AsJson = False,
) -> None:
    """Quantize graphs with a recipe.

    If a recipe quantizes activations, it is calibrated first: the model generates answers to prompts.
    """
    from canvasrt.calibration_prompts import check_calibration
    from canvasrt.extras import require
    from canvasrt.recipes.recipe import load_recipe

    recipe = load_recipe(precision)
    check_calibration(calibration, recipe.is_calibrated, recipe.name)
    for module in ("torch", "onnx_ir", "modelopt"):
        require(module, "export")
    from canvasrt.export.quantize.quantize import quantize_graphs

    with progress():
        bundle = quantize_graphs(graphs, out, recipe, calibration)
    _show(bundle, recipe.name)


def _show(bundle: Bundle, recipe: str) -> None:
    from canvasrt.export.quantize.quantize import read_calibration

    manifest, found = bundle.manifest, read_calibration(bundle)
    formats = {
        name: form
        for entry in manifest.segments
        for name, form in entry.get("quantized", {}).items()
    }
    idle: dict[str, list[int]] = found["idle_experts"]
    data: dict[str, Any] = {
        "bundle": str(bundle.path),
        "kind": manifest.kind,
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "recipe": recipe,
        "precision": manifest.options["precision"],
        "quantized": formats,
        "prompts": found["prompts"],
        "denoising_passes": sum(found["denoising_passes"]),
        "idle_experts": idle,
    }

    passes = f"{found['prompts']} prompts in {data['denoising_passes']} denoising passes"
    calibrated = f"; calibrated on {passes}" if found["prompts"] else ""

    def render(console: Any) -> None:
        console.print(
            f"{bundle.path}: {len(formats)} weights quantized by {recipe}, {size(manifest.total_bytes)}{calibrated}"
        )
        if idle:
            count = sum(map(len, idle.values()))
            console.print(
                f"no token was routed to {count} experts ({_named(idle)}), so they use their layer's"
                " input scale; more or different prompts may reach them"
            )

    emit(data, render)


def _named(idle: dict[str, list[int]], most: int = 3) -> str:
    """Return text that lists the idle experts of up to `most` layers: `layers.3: 1, 5; …`."""
    named = [f"{layer}: {', '.join(map(str, experts))}" for layer, experts in idle.items()]
    return "; ".join(named[:most]) + ("; …" if len(named) > most else "")
