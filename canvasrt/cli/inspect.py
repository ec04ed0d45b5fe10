"""`canvasrt inspect`: prints a bundle's manifest."""

from collections.abc import Sequence
from typing import Any

from canvasrt.cli import options
from canvasrt.console import emit, size, table


def inspect(bundle: options.BundlePath, as_json: options.AsJson = False) -> None:
    """Show a bundle's content and origin, without checking its files."""
    from canvasrt.bundle import load_bundle

    manifest = load_bundle(bundle, check=False).manifest
    target = manifest.target or {}

    def render(console: Any) -> None:
        facts = [
            ("kind", manifest.kind),
            ("digest", manifest.digest),
            ("size", f"{size(manifest.total_bytes)} in {len(manifest.files)} files"),
            ("target", _pairs(target)),
            ("made by", _pairs(manifest.made_by)),
            ("made from", _pairs(_short(manifest.made_from))),
            ("options", _pairs(_named(manifest.options))),
            ("quantized", _quantized(manifest.segments)),
            *_model_facts(manifest),
        ]
        width = max(len(name) for name, _ in facts)
        for name, value in facts:
            if value:
                console.print(f"{name:<{width}}  {value}", markup=False)
        _show_profiles(console, manifest.segments)
        rows = [
            (name, size(entry["bytes"]), entry["sha256"][:16])
            for name, entry in manifest.files.items()
        ]
        console.print()
        console.print(table(("file", "size", "SHA-256"), rows))

    emit(manifest.data, as_json, render)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a recipe's name instead of its content, which `--json` shows."""
    recipe = options.get("recipe")
    return {**options, "recipe": recipe["name"]} if isinstance(recipe, dict) else options


def _quantized(segments: Sequence[dict[str, Any]]) -> str:
    """Return how many weights are in which format."""
    formats = [each for segment in segments for each in segment.get("quantized", {}).values()]
    return ", ".join(f"{formats.count(each)} weights {each}" for each in sorted(set(formats)))


def _model_facts(manifest: Any) -> list[tuple[str, str]]:
    model, sampler = manifest.model, manifest.sampler
    kinds = [layer.kind for layer in model.layers]
    return [
        (
            "model",
            f"{len(kinds)} layers ({kinds.count('sliding')} sliding, {kinds.count('full')} full),"
            f" hidden {model.hidden_size}, {model.num_experts} experts (top {model.top_k_experts}),"
            f" vocabulary {model.vocab_size}",
        ),
        (
            "canvas",
            f"{model.canvas_length} tokens, at most {sampler.max_denoising_steps} steps a block,"
            f" temperature {sampler.t_max} to {sampler.t_min}, entropy bound {sampler.entropy_bound}",
        ),
        ("vision", "yes" if model.vision else "no"),
        ("tokenizer", "yes" if manifest.tokenizer else "no"),
        ("segments", ", ".join(segment["name"] for segment in manifest.segments)),
    ]


def _show_profiles(console: Any, segments: Sequence[dict[str, Any]]) -> None:
    """Print the sizes each engine supports, one line per segment and profile."""
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
        console.print("\nprofiles (minimum..typical..maximum)")
    for segment, name, *sizes in rows:
        console.print(f"  {segment:<8}  {name:<13}  {', '.join(sizes)}", markup=False)


def _sizes(size: dict[str, int]) -> str:
    least, usual, most = size["min"], size["opt"], size["max"]
    return str(most) if least == most else f"{least}..{usual}..{most}"


def _short(made_from: Any) -> dict[str, Any]:
    """Flatten nested values, and shorten hashes."""
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
