"""Quantizes weights by a recipe while graphs are written, from a checkpoint or from a bundle of plain graphs."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.cache import kept_piece, unfinished
from canvasrt.calibration_prompts import (
    CALIBRATED,
    CALIBRATIONS,
    QUANTIZATIONS,
    CalibrationPrompts,
    work_of,
)
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import TABLE, local_names
from canvasrt.errors import CanvasError
from canvasrt.export.compressed_tensors import Int4Codes, TableCodes
from canvasrt.export.modelopt import StoredCodes
from canvasrt.export.onnx import write_graph
from canvasrt.export.quantize import quantizers
from canvasrt.export.quantize.calibrate import Calibration, calibrate
from canvasrt.export.quantize.quantizers import form_of
from canvasrt.export.quantize.stored_weights import StoredWeights
from canvasrt.export.segments import SegmentModule
from canvasrt.export.weights import Weight
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.graphs import external, lowbits
from canvasrt.graphs.embedding_table import embedding_entry, host_head_of
from canvasrt.graphs.external import Stored
from canvasrt.graphs.packed import Form, Packed
from canvasrt.graphs.quantized import (
    KEY_SCALE,
    VALUE_SCALE,
    quantize_cache,
    quantize_graph,
    stored_parts,
)
from canvasrt.progress import counter
from canvasrt.recipes.recipe import Choice, Recipe, load_recipe
from canvasrt.staging import check_output, link_or_copy, staging
from canvasrt.types import Json

CALIBRATION_FILE = "calibration.json"
PACKAGES = ("nvidia-modelopt", "torch", "onnx-ir")
# At most this many rows of a matrix are in float32 at a time.
_ROWS = 16_384


class Part(NamedTuple):
    """One graph of a bundle: its name, and the indices of the layers that it contains."""

    name: str
    layers: Sequence[int]

    @classmethod
    def of(cls, entry: Json) -> Part:
        return cls(entry["name"], tuple(entry.get("layers", ())))


class Quantizer:
    """Quantizes the weights of graphs as they are written, or copies a quantized checkpoint's codes."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        calibration: Calibration,
        stored: Mapping[str, StoredCodes | Int4Codes | TableCodes] | None = None,
    ) -> None:
        """If `stored` is set, it has the quantized weights by global name, and `recipe` describes them. Raises
        CanvasError for a recipe that does not fit the model."""
        self._stored = stored or {}
        self._choices: dict[str, Choice] = {} if stored else recipe.formats(config)
        self._formats = {name: codes.form.format for name, codes in self._stored.items()}
        self._formats |= {name: choice.format for name, choice in self._choices.items()}
        self._recipe, self._calibration = recipe, calibration
        if not stored:
            _load_modelopt()

    @property
    def made_from(self) -> Json:
        """The entries that quantization adds to `made_from` in the manifest."""
        sha256 = self._calibration.sha256
        return {"calibration": sha256} if sha256 else {}

    def options(self, base: str) -> Json:
        """Return options for the manifest. `base` is the precision of unquantized weights."""
        return {
            "precision": self._recipe.precision,
            "base_precision": base,
            "recipe": self._recipe.to_json(),
        }

    def formats(self, part: Part | SegmentModule) -> dict[str, str]:
        """Return the formats of weights that are quantized in a graph, by global name."""
        return {name: self._formats[name] for name in self._local(part)}

    def changes(self, part: Part | SegmentModule) -> bool:
        """Return whether any weight or cache of a graph is quantized."""
        return bool(self._local(part) or self._cache_scales(part))

    def holds_table(self) -> bool:
        """Return whether the table itself is quantized, not only its two products."""
        return TABLE in self._formats and FORMATS[self._formats[TABLE]].of_table

    def rewrite(
        self, part: Part | SegmentModule, model: ir.Model, items: Iterable[Weight | Stored]
    ) -> Iterator[Weight | Stored]:
        """Rewrite a graph to the quantized forms. Yield the weights to write, which are quantized one after another."""
        names = {local: name for name, local in self._local(part).items()}
        stored = model.graph.initializers
        narrow = any(value.dtype == ir.DataType.BFLOAT16 for value in stored.values())
        dtype = torch.bfloat16 if narrow else torch.float32
        forms = {}
        for local, name in names.items():
            if name in self._stored:
                forms[local] = self._stored[name].form
                continue
            choice, dims = self._choices[name], stored[local].shape
            shape = () if dims is None else dims.numpy()
            forms[local] = form_of(shape, choice.format, choice.weights, experts=len(shape) == 3)
        return quantized_items(
            model,
            items,
            forms,
            lambda item: self._pack(names[item.name], partial(_matrices, item, dtype), item.shape),
            self._cache_scales(part),
        )

    def write_calibration(self, folder: Path) -> None:
        """Write the calibration's results."""
        text = json.dumps(self._calibration.to_json(), indent=2) + "\n"
        (folder / CALIBRATION_FILE).write_text(text, encoding="utf-8")

    def _local(self, part: Part | SegmentModule) -> dict[str, str]:
        return local_names(part.name, part.layers, self._formats)

    def _pack(
        self, name: str, parts: Callable[[], Iterator[np.ndarray]], shape: tuple[int, ...]
    ) -> Packed:
        if name in self._stored:
            codes, scale = self._stored[name], None
            if not codes.is_complete:  # TensorRT needs the input's scale as a constant
                scale = FORMATS[codes.form.format].scale(self._calibration.amax[name])
            return codes.pack(scale)
        choice = self._choices[name]
        amax = None
        if FORMATS[choice.format].rounds_inputs:
            # If the calibration recorded only zeros, any scale works. Use 1.
            amax = self._calibration.amax[name] or FORMATS[choice.format].largest
        if name == TABLE and amax is not None:
            return quantizers.quantize_in_parts(parts, choice.format, amax, name)
        return quantizers.quantize_weight(
            parts(),
            choice.format,
            amax,
            choice.method,
            choice.weights,
            experts=len(shape) == 3,
            name=name,
        )

    def _cache_scales(self, part: Part | SegmentModule) -> dict[str, float] | None:
        format, found = self._recipe.kv_cache, self._calibration.cache
        if format is None or not part.layers:
            return None
        return {
            f"layers.{place}.{suffix}": FORMATS[format].scale(found[f"layers.{layer}.{kind}"])
            for place, layer in enumerate(part.layers)
            for kind, suffix in (("key", KEY_SCALE), ("value", VALUE_SCALE))
        }


def quantized_items(
    model: ir.Model,
    items: Iterable[Weight | Stored],
    forms: Mapping[str, Form],
    pack: Callable[[Any], Packed],
    cache_scales: Mapping[str, float] | None = None,
) -> Iterator[Weight | Stored]:
    """Rewrite `model` when iteration starts. Yield the weights to write: unquantized weights, the parts of
    quantized weights, and the cache's scales.

    Args:
        forms: the quantized weights' forms by initializer name.
        pack: quantizes an item. It is called for one item at a time, in order.
        cache_scales: an FP8 key-value cache's scales by initializer name; None if the cache has the graph's dtype.
    """
    if forms:
        quantize_graph(model, forms)
    scales = [] if cache_scales is None else quantize_cache(model)
    for item in items:
        if item.name not in forms:
            yield item
            continue
        if item.name in model.graph.initializers:  # the unquantized table, kept for lookups
            yield item
        packed = pack(item)
        if packed.form != forms[item.name]:
            raise ValueError(f"{item.name} was quantized to {packed.form}, not as planned")
        yield from stored_parts(model, item.name, packed)
    for name in scales:
        assert cache_scales is not None
        scale = np.array(cache_scales[name], np.float32)
        yield external.stored(name, ir.DataType.FLOAT, (), scale)


def quantize_graphs(
    graphs: Bundle | Path | str,
    out: Path | str,
    recipe: Recipe | str | Path,
    calibration_file: Path | str | None = None,
    calibration: Calibration | None = None,
) -> Bundle:
    """Write the quantized graph bundle of `graphs` to `out`.

    Args:
        graphs: a bundle that `canvasrt export` wrote, in bf16 (which GPUs need) or fp32.
        recipe: the name of one of canvasrt's recipes, a recipe file, or a loaded recipe.
        calibration_file: a JSONL file of prompts; by default, the prompts that come with canvasrt.
        calibration: the result of an earlier calibration, which is then not repeated. Recipes that only quantize
        weights need neither prompts nor a calibration.

    Raises `CanvasError` for graphs that are quantized already, for a recipe or prompts that do not fit the model, and
    if `out` is not empty. An interrupted call leaves its progress in the cache, and another call continues from it.
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    out = Path(out).expanduser().resolve()
    check_output(out)
    if not isinstance(graphs, Bundle):
        graphs = load_bundle(graphs, "graphs")
    manifest = graphs.manifest
    _check(graphs)
    prompts = None
    if chosen.is_calibrated and calibration is None:
        file = None if calibration_file is None else Path(calibration_file)
        files = {Path(name).name: graphs.file(name) for name in manifest.tokenizer or ()}
        prompts = CalibrationPrompts.of(
            file, chosen, manifest.model, manifest.sampler, manifest.made_from, files
        )
    known = calibration and calibration.to_json()
    work = work_of({"graphs": manifest.digest, "known": known}, chosen, prompts)
    if prompts is not None:
        with unfinished(CALIBRATIONS, work, keep=CALIBRATED) as progress:
            calibration = calibrate(StoredWeights(graphs), chosen, prompts, progress)
    with unfinished(QUANTIZATIONS, work) as room:
        quantizer = Quantizer(manifest.model, chosen, calibration or Calibration())
        with staging(out) as tmp:
            _write(graphs, tmp, room, quantizer)
            quantizer.write_calibration(tmp)
            _describe(graphs, tmp, quantizer)
    return load_bundle(out, kind="graphs", check=False)


def read_calibration(bundle: Bundle) -> dict[str, Any]:
    """Return the calibration results of a quantized bundle, as in `Calibration.to_json`."""
    return json.loads(bundle.file(CALIBRATION_FILE).read_text(encoding="utf-8"))


def _load_modelopt() -> None:
    """Import ModelOpt, and hide two warnings: ModelOpt's about the version of transformers, which matters only for
    loading models; and torch's about a missing GPU, which matters only for compiling kernels.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization  # noqa: F401


def _check(graphs: Bundle) -> None:
    """Raise CanvasError for graphs that cannot be quantized."""
    precision = graphs.manifest.options.get("precision", "fp32")
    if precision not in PLAIN or any(each.get("quantized") for each in graphs.manifest.segments):
        raise CanvasError(
            f"{graphs.path} is already quantized ({precision})",
            "quantize graphs that `canvasrt export --precision bf16` wrote",
        )


def _write(graphs: Bundle, out: Path, room: Path, quantizer: Quantizer) -> None:
    """Write all graphs and their files, but not the manifest. Graphs in which nothing is quantized become links."""
    files = graphs.manifest.files
    changed = [entry for entry in graphs.manifest.segments if quantizer.changes(Part.of(entry))]
    data = {str(Path(entry["file"]).with_suffix(".bin")) for entry in changed}
    if quantizer.holds_table():
        data.add(graphs.manifest.embedding["file"])
    anew = {CALIBRATION_FILE, *data, *(entry["file"] for entry in changed)}
    for name in files.keys() - anew:
        link_or_copy(graphs.file(name), out / name)
    loaded = {entry["name"]: external.load(graphs.file(entry["file"])) for entry in changed}
    sizes = {
        name: sum(math.prod(item.shape) for item in items) for name, (_, items, _) in loaded.items()
    }
    advance = counter("quantizing", sum(sizes.values()))

    def quantize(entry: Json, folder: Path) -> None:
        model, items, apart = loaded.pop(entry["name"])
        written = quantizer.rewrite(Part.of(entry), model, counted(items, advance))
        kept = (each for each in written if each.name not in apart)
        write_graph(model, kept, folder / entry["file"], own_files=apart)

    for entry in changed:
        if kept_piece(room / entry["name"], partial(quantize, entry), out):
            advance(sizes[entry["name"]])


def counted(items: Iterable[Any], advance: Callable[[int], None]) -> Iterator[Any]:
    """Yield weights. After a weight is written, call `advance` with its number of elements."""
    for item in items:
        yield item
        advance(math.prod(item.shape))


def _matrices(item: Weight | Stored, dtype: torch.dtype) -> Iterator[np.ndarray]:
    """Yield a weight in float32, piece by piece. A piece is one expert's matrix `[out, in]`. If the weight has no
    experts, a piece is some of its rows."""
    *_, width = shape = item.shape
    size = width * (shape[-2] if len(shape) == 3 else min(shape[0], _ROWS))
    rest = np.empty(0, np.float32)
    for piece in _wide(item, dtype):
        rest = np.concatenate([rest, piece]) if rest.size else piece
        whole = rest.size - rest.size % size
        yield from rest[:whole].reshape(-1, size // width, width)
        rest = rest[whole:]
    if rest.size:
        yield rest.reshape(-1, width)


def _wide(item: Weight | Stored, dtype: torch.dtype) -> Iterator[np.ndarray]:
    """Yield a weight's numbers, rounded to `dtype`, in float32."""
    if isinstance(item, Weight):
        for part in item.read(dtype):
            yield part.to(torch.float32).numpy().reshape(-1)
        return
    for piece in item.read():
        if dtype == torch.bfloat16:
            yield lowbits.from_bf16(np.frombuffer(piece, np.uint16))
        else:
            yield np.frombuffer(piece, np.float32)


def _describe(graphs: Bundle, out: Path, quantizer: Quantizer) -> None:
    """Write the manifest."""
    manifest = graphs.manifest
    (head,) = (entry["file"] for entry in manifest.segments if entry["name"] == "head")
    segments = []
    for entry in manifest.segments:
        quantized = quantizer.formats(Part.of(entry))
        segments.append({**entry, "quantized": quantized} if quantized else entry)
    same = {
        name: entry
        for name, entry in manifest.files.items()
        if (out / name).is_file() and (out / name).samefile(graphs.path / name)
    }
    write_manifest(
        out,
        kind="graphs",
        made_from={**manifest.made_from, **quantizer.made_from},
        options={
            **manifest.options,
            **quantizer.options(manifest.options.get("precision", "fp32")),
        },
        model=manifest.model,
        sampler=manifest.sampler,
        segments=segments,
        embedding={**embedding_entry(out / head), **host_head_of(manifest.embedding)},
        tokenizer=manifest.tokenizer,
        packages=tuple(dict.fromkeys((*manifest.made_by, *PACKAGES))),
        known=same,
    )
