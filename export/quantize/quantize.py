"""Turns a graph bundle into a quantized one by a recipe: calibrated, then rewritten one weight at a time."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.checkpoints.weight_names import TABLE, local_names
from canvasrt.errors import CanvasError
from canvasrt.export.quantize import quantizers
from canvasrt.export.quantize.calibrate import Calibration, calibrate
from canvasrt.export.quantize.forms import KEY_SCALE, VALUE_SCALE, quantize_file
from canvasrt.export.quantize.packed import Form, Packed
from canvasrt.export.quantize.quantizers import form_of
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.graphs import external, lowbits
from canvasrt.graphs.table import embedding_entry, host_head_of
from canvasrt.progress import Progress, no_progress
from canvasrt.recipes.recipe import Choice, Recipe, load_recipe
from canvasrt.staging import check_output, scratch, staging

CALIBRATION_FILE = "calibration.json"
# Rows of a matrix in float32 at a time.
_ROWS = 16_384
_PACKAGES = ("nvidia-modelopt", "torch", "onnx-ir", "onnxruntime")


def quantize_graphs(
    graphs: Bundle | Path | str,
    out: Path | str,
    recipe: Recipe | str | Path,
    calibration_file: Path | str | None = None,
    progress: Progress | None = None,
    calibration: Calibration | None = None,
) -> Bundle:
    """Write the quantized graph bundle of `graphs` to `out`.

    Args:
        graphs: a bundle that `canvasrt export` wrote, bf16 for GPUs, or fp32.
        recipe: one of canvasrt's by name, a file, or a loaded one.
        calibration_file: prompts as JSONL; by default those that come with canvasrt.
        calibration: an earlier result, to skip the run. Recipes that only quantize weights need none.

    Raises `CanvasError` for graphs that are quantized already, for a recipe or prompts that do not fit the model, and
    if `out` is not empty. Nothing is left behind then.
    """
    report = progress or no_progress
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    out = Path(out).expanduser().resolve()
    check_output(out)
    if not isinstance(graphs, Bundle):
        graphs = load_bundle(
            graphs, "graphs", progress=lambda done, total: report("checking graphs", done, total)
        )
    choices = _check(graphs, chosen)
    if calibration is None and not chosen.is_calibrated:
        calibration = Calibration()
    if calibration is None:
        prompts = None if calibration_file is None else Path(calibration_file).expanduser()
        # On the result's disk, which has room for graphs.
        with scratch(out.parent / f"{out.name}.calibration") as folder:
            calibration = calibrate(graphs, chosen, prompts, report, folder)
    _load_modelopt()
    with staging(out) as tmp:
        _write(graphs, tmp, choices, chosen.kv_cache, calibration, report)
        text = json.dumps(calibration.to_json(), indent=2) + "\n"
        (tmp / CALIBRATION_FILE).write_text(text, encoding="utf-8")
        _describe(graphs, tmp, chosen, choices, calibration)
    return load_bundle(out, kind="graphs", check=False)


def read_calibration(bundle: Bundle) -> dict[str, Any]:
    """Return what the calibration of a quantized bundle observed: `Calibration.to_json`."""
    return json.loads(bundle.file(CALIBRATION_FILE).read_text(encoding="utf-8"))


def _load_modelopt() -> None:
    """Import ModelOpt once without its warnings about transformers' version: it does not load models here.

    Nor does it compile kernels, so torch need not warn that there is CUDA but no GPU.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization  # noqa: F401


def _check(graphs: Bundle, recipe: Recipe) -> dict[str, Choice]:
    """Return each weight's choice. Raises CanvasError for graphs that cannot be quantized."""
    precision = graphs.manifest.options.get("precision", "fp32")
    if precision not in PLAIN or any(each.get("quantized") for each in graphs.manifest.segments):
        raise CanvasError(
            f"{graphs.path} is already quantized ({precision})",
            "quantize graphs that `canvasrt export --precision bf16` wrote",
        )
    return recipe.formats(graphs.manifest.model)


def _write(
    graphs: Bundle,
    out: Path,
    choices: Mapping[str, Choice],
    cache: str | None,
    calibration: Calibration,
    report: Progress,
) -> None:
    """Write every file of the bundle except its manifest: graphs with quantized weights anew, the
    rest as links."""
    from canvasrt.staging import link_or_copy

    changed = {}
    for entry in graphs.manifest.segments:
        local = local_names(entry, choices)
        if local or (cache and "layers" in entry):
            changed[entry["file"]] = (entry, {name: choices[name] for name in local})
    data = {str(Path(name).with_suffix(".bin")) for name in changed}
    if TABLE in choices and FORMATS[choices[TABLE].format].of_table:
        data.add(graphs.manifest.embedding["file"])
    for name in graphs.manifest.files:
        if name not in changed and name not in data and name != CALIBRATION_FILE:
            link_or_copy(graphs.file(name), out / name)
    total = sum(graphs.manifest.files[name]["bytes"] for name in data)
    done = 0
    for name, (entry, own) in changed.items():
        segment = _QuantizedGraph(graphs.file(name), entry, own, calibration)
        segment.write(out / name, cache, partial(_report_part, report, done, total))
        done += graphs.manifest.files[str(Path(name).with_suffix(".bin"))]["bytes"]
        if TABLE in own and graphs.manifest.embedding["file"] in data:
            done += graphs.manifest.files[graphs.manifest.embedding["file"]]["bytes"]
    report("quantizing", total, total)


def _report_part(report: Progress, before: int, total: int, read: int) -> None:
    report("quantizing", before + read, total)


class _QuantizedGraph:
    """One graph, whose weights are quantized on demand."""

    def __init__(
        self,
        source: Path,
        entry: Mapping[str, Any],
        choices: Mapping[str, Choice],
        calibration: Calibration,
    ) -> None:
        self._source, self._entry = source, entry
        self._choices, self._calibration = choices, calibration
        self._names = {local: name for name, local in local_names(entry, choices).items()}
        self._graph = ir.load(source).graph
        self._read = 0
        self._report: Callable[[int], object] = lambda read: None

    def write(self, out: Path, cache: str | None, report: Callable[[int], object]) -> None:
        """Write the quantized graph. `report` is called with the bytes of weights read so far."""
        self._report = report
        quantize_file(
            self._source,
            out,
            {local: self._form(local) for local in self._names},
            self._pack,
            self._cache_scales(cache) if cache and "layers" in self._entry else None,
        )

    def _form(self, local: str) -> Form:
        choice = self._choices[self._names[local]]
        shape = _shape(self._tensor(local))
        return form_of(shape, choice.format, choice.weights, experts=len(shape) == 3)

    def _pack(self, local: str) -> Packed:
        name = self._names[local]
        choice, tensor = self._choices[name], self._tensor(local)
        amax = None
        if FORMATS[choice.format].rounds_inputs:
            # If calibration saw only zeros, any scale works; use 1.
            amax = self._calibration.amax[name] or FORMATS[choice.format].largest
        if name == TABLE and amax is not None:
            packed = quantizers.quantize_in_parts(
                partial(_matrices, tensor), choice.format, amax, name
            )
        else:
            packed = quantizers.quantize_weight(
                _matrices(tensor),
                choice.format,
                amax,
                choice.method,
                choice.weights,
                experts=len(tensor.shape) == 3,
                name=name,
            )
        self._read += tensor.nbytes
        self._report(self._read)
        return packed

    def _cache_scales(self, format: str) -> dict[str, float]:
        found = self._calibration.cache
        return {
            f"layers.{place}.{suffix}": FORMATS[format].scale(found[f"layers.{layer}.{part}"])
            for place, layer in enumerate(self._entry["layers"])
            for part, suffix in (("key", KEY_SCALE), ("value", VALUE_SCALE))
        }

    def _tensor(self, local: str) -> ir.ExternalTensor:
        tensor = self._graph.initializers[local].const_value
        assert isinstance(tensor, ir.ExternalTensor), local
        return tensor


def _shape(tensor: ir.ExternalTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape.numpy())


def _matrices(tensor: ir.ExternalTensor) -> Iterator[np.ndarray]:
    """Yield one expert's matrix `[out, in]` at a time, or some rows of another weight, in float32."""
    shape = _shape(tensor)
    narrow = tensor.dtype == ir.DataType.BFLOAT16
    stored = external.mapped(tensor).view(np.uint16 if narrow else np.float32)
    rows = shape[-2] if len(shape) == 3 else min(shape[0], _ROWS)
    for first in range(0, stored.size, rows * shape[-1]):
        part = stored[first : first + rows * shape[-1]]
        wide = lowbits.from_bf16(part.view(np.uint16)) if narrow else part.astype(np.float32)
        yield wide.reshape(-1, shape[-1])


def _describe(
    graphs: Bundle,
    out: Path,
    recipe: Recipe,
    choices: Mapping[str, Choice],
    calibration: Calibration,
) -> None:
    """Write the manifest."""
    manifest = graphs.manifest
    (head,) = (entry["file"] for entry in manifest.segments if entry["name"] == "head")
    segments = []
    for entry in manifest.segments:
        quantized = {name: choices[name].format for name in local_names(entry, choices)}
        segments.append({**entry, "quantized": quantized} if quantized else entry)
    same = {
        name: entry
        for name, entry in manifest.files.items()
        if (out / name).is_file() and (out / name).samefile(graphs.path / name)
    }
    write_manifest(
        out,
        kind="graphs",
        made_from={
            **manifest.made_from,
            "graphs": manifest.digest,
            **({"calibration": calibration.sha256} if calibration.sha256 else {}),
        },
        options={
            **manifest.options,
            "precision": recipe.precision,
            "base_precision": manifest.options.get("precision", "fp32"),
            "recipe": recipe.to_json(),
        },
        model=manifest.model,
        sampler=manifest.sampler,
        segments=segments,
        embedding={**embedding_entry(out / head), **host_head_of(manifest.embedding)},
        tokenizer=manifest.tokenizer,
        packages=tuple(dict.fromkeys((*manifest.made_by, *_PACKAGES))),
        known=same,
    )
