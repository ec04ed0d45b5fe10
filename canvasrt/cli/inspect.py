"""`canvasrt inspect`: prints a bundle's manifest or its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli import options
from canvasrt.console import emit, show_section, size, table
from canvasrt.targets import TARGETS
from canvasrt.types import Json

if TYPE_CHECKING:
    from canvasrt.bundle import Bundle

Kernels = Annotated[
    bool,
    typer.Option(
        "--kernels", help="Show the engines' kernels instead, with their predicted times."
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="N", min=1, help="With --kernels: requests per pass.")
]
Context = Annotated[
    int,
    typer.Option(
        "--context", metavar="TOKENS", min=0, help="With --kernels: cached tokens per request."
    ),
]
Capacity = Annotated[
    int | None,
    options.option(
        "--capacity",
        "SLOTS",
        "With --kernels: slots per expert. Default: enough for nearly uniform routing.",
        min=1,
    ),
]
GpuName = Annotated[
    str | None,
    options.option(
        "--gpu", "NAME", "With --kernels: predict for this GPU. Default: the bundle's target."
    ),
]
Rates = Annotated[
    Path | None,
    options.option(
        "--rates",
        "FILE",
        "With --kernels: use the measured rates in this file, which `python -m bench floor -o FILE` wrote.",
    ),
]
Page = Annotated[
    Path | None,
    options.option(
        "--page", "DIR", "With --kernels: also write kernels.json and kernels.html to this folder."
    ),
]
# Options that require --kernels.
_OF_KERNELS = ("batch", "context", "capacity", "gpu", "rates", "page")


def inspect(
    command: typer.Context,
    bundle: options.BundlePath,
    kernels: Kernels = False,
    batch: Batch = 1,
    context: Context = 1024,
    capacity: Capacity = None,
    gpu: GpuName = None,
    rates: Rates = None,
    page: Page = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a bundle's contents and origin, without checking its files."""
    from canvasrt.bundle import load_bundle

    if not kernels:
        options.refuse(command, _OF_KERNELS, "needs --kernels", "add --kernels")
    loaded = load_bundle(bundle, check=False)
    if kernels:
        _show_kernels(loaded, batch, context, capacity, gpu, rates, page)
        return
    emit(loaded.manifest.data, lambda console: _render(console, loaded))


def _render(console: Any, bundle: Bundle) -> None:
    manifest = bundle.manifest
    facts = [
        ("kind", manifest.kind),
        ("digest", manifest.digest),
        ("size", f"{size(manifest.total_bytes)} in {len(manifest.files)} files"),
        ("target", _pairs(manifest.target or {})),
        ("made by", _pairs(manifest.made_by)),
        ("made from", _pairs(_short(manifest.made_from))),
        ("options", _pairs(_named(manifest.options))),
        ("quantized", _quantized(manifest.segments)),
        *_model_facts(bundle),
    ]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        if value:
            console.print(f"{name:<{width}}  {value}")
    _show_profiles(console, manifest.segments)
    rows = [
        (name, size(entry["bytes"]), entry["sha256"][:16]) for name, entry in manifest.files.items()
    ]
    console.print()
    console.print(table(("file", "size", "SHA-256"), rows))


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the recipe's name instead of its content, which `--json` shows."""
    recipe = options.get("recipe")
    return {**options, "recipe": recipe["name"]} if isinstance(recipe, dict) else options


def _quantized(segments: Sequence[dict[str, Any]]) -> str:
    """Return how many weights each format has, as text."""
    formats = [each for segment in segments for each in segment.get("quantized", {}).values()]
    return ", ".join(f"{formats.count(each)} weights {each}" for each in sorted(set(formats)))


def _model_facts(bundle: Bundle) -> list[tuple[str, str]]:
    manifest = bundle.manifest
    model, sampler = manifest.model, manifest.sampler
    kinds = [layer.kind for layer in model.layers]
    names = [segment["name"] for segment in manifest.segments]
    return [
        (
            "model",
            f"{len(kinds)} layers ({kinds.count('sliding')} sliding, {kinds.count('full')} full),"
            f" hidden {model.hidden_size}, {model.num_experts} experts (top {model.top_k_experts}),"
            f" vocabulary {model.vocab_size}",
        ),
        (
            "canvas",
            f"{model.canvas_length} tokens, at most {sampler.max_denoising_steps} steps per block,"
            f" temperature {sampler.t_max} to {sampler.t_min}, entropy bound {sampler.entropy_bound}",
        ),
        ("vision", _tower(bundle) if "vision" in names else "none"),
        ("tokenizer", "yes" if manifest.tokenizer else "no"),
        ("segments", ", ".join(names)),
    ]


def _tower(bundle: Bundle) -> str:
    """Return the vision tower's size and, if the chat template takes no images, a note that says so."""
    vision = bundle.manifest.model.vision or {}
    unused = "" if bundle.takes_images else "; unused: the chat template takes no images"
    return f"{vision['num_hidden_layers']}-layer tower, hidden {vision['hidden_size']}{unused}"


def _show_profiles(console: Any, segments: Sequence[dict[str, Any]]) -> None:
    """Print the sizes that engines accept, one line per segment and profile."""
    rows = [
        (
            segment["name"],
            profile.get("name", ""),
            *(f"{name} {_sizes(size)}" for name, size in profile.items() if name != "name"),
        )
        for segment in segments
        for profile in segment.get("profiles", ())
    ]
    if rows:
        console.print("\nprofiles (least..usual..most)")
    for segment, name, *sizes in rows:
        console.print(f"  {segment:<8}  {name:<13}  {', '.join(sizes)}")


def _sizes(size: dict[str, int]) -> str:
    least, usual, most = size["min"], size["opt"], size["max"]
    return str(most) if least == most else f"{least}..{usual}..{most}"


def _short(made_from: Any) -> dict[str, Any]:
    """Flatten nested mappings into one mapping, and shorten hashes."""
    flat: dict[str, Any] = {}
    for name, value in made_from.items():
        if isinstance(value, dict):
            for inner, deep in _short(value).items():
                flat[f"{name}.{inner}" if name not in ("source", "files") else inner] = deep
        elif isinstance(value, str) and len(value) == 64:
            flat[name] = value[:16]
        else:
            flat[name] = value
    return flat


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _show_kernels(
    bundle: Bundle,
    batch: int,
    context: int,
    capacity: int | None,
    gpu: str | None,
    measured: Path | None,
    page: Path | None,
) -> None:
    """Predict a bundle's passes, and print the predictions. If `page` is a folder, also write an HTML page there."""
    from canvasrt.roofline import rates
    from canvasrt.roofline.predict import Predictor
    from canvasrt.roofline.report import prediction_report
    from canvasrt.roofline.sections import heading, sections

    predictor = Predictor(bundle)
    if capacity is not None:
        predictor.check_capacity(batch, capacity)
    target = bundle.manifest.target or {}
    found = rates.find_gpu(gpu or _usual_gpu(target))
    if measured is not None:
        found = rates.measured(found, measured)
    data = prediction_report(predictor, found, batch, context, capacity)
    if page is not None:
        from canvasrt.roofline.page import write_page

        write_page(data, bundle.path.resolve().name, page)

    def render(console: Any) -> None:
        for line in heading(data):
            console.print(line)
        for each in sections(data):
            show_section(console, each)
        if page is not None:
            console.print(f"\npage: {page / 'kernels.html'}")

    emit(data, render)


def _usual_gpu(target: Json) -> str:
    """Return the default GPU for predictions: the target's own, or else a GPU with the target's first capability."""
    from canvasrt.roofline.rates import GPUS

    name, capabilities = target.get("name", ""), target.get("compute_capability", "")
    if name in GPUS:
        return name
    first = capabilities.partition(",")[0]
    alike = (each.name for each in TARGETS if each.capability_text == first and each.name in GPUS)
    return next(alike, name)
