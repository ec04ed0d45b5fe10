"""What a build will do, decided and checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt import checkpoints, extras, memory
from canvasrt.bundle import MANIFEST, Bundle, load_bundle, made_by
from canvasrt.errors import CanvasError
from canvasrt.model import ModelConfig
from canvasrt.progress import Progress, no_progress
from canvasrt.targets import Target, check_precision, find_target

DEFAULT_MAX_CONTEXT = 32_768
DEFAULT_MAX_BATCH = 4


@dataclass(frozen=True)
class Source:
    """A checkpoint, or the graphs that were exported from one; `made_from` holds its hashes."""

    path: Path
    model: ModelConfig
    made_from: dict[str, Any]
    graphs: Bundle | None

    @property
    def precision(self) -> str | None:
        """That of the graphs; None for a checkpoint, which can be exported in any."""
        return None if self.graphs is None else precision_of(self.graphs)


@dataclass(frozen=True)
class Plan:
    """One engine bundle to be made."""

    source: Source
    target: Target
    precision: str
    max_context: int
    max_batch: int
    out: Path

    @property
    def options(self) -> dict[str, Any]:
        """The part of the manifest that the user chose."""
        return {
            "precision": self.precision,
            "max_context": self.max_context,
            "max_batch": self.max_batch,
        }

    @property
    def memory(self) -> memory.Estimate:
        """The memory that serving takes."""
        return memory.estimate(
            self.source.model,
            self.precision,
            self.max_context,
            self.max_batch,
            on_cpu=self.target.capability is None,
        )

    @property
    def fits(self) -> bool | None:
        """Whether that fits the target's memory; None where the target does not say how much it has."""
        return None if self.target.memory is None else self.memory.total <= self.target.memory

    def existing(self) -> Bundle | None:
        """The bundle that a former build left at `out`, when it is just what this one would make.

        Raises CanvasError when `out` holds something else.
        """
        if not (self.out / MANIFEST).exists():
            return None
        found = load_bundle(self.out, kind="engines", check=False)
        difference = self._difference(found)
        if difference:
            raise CanvasError(
                f"{self.out} holds engines made {difference}",
                "name another folder with -o, or remove this one first",
            )
        return load_bundle(self.out, kind="engines")

    def _difference(self, found: Bundle) -> str:
        manifest = found.manifest
        if manifest.made_from.get("source") != self.source.made_from:
            return "from another checkpoint or other graphs"
        if (manifest.target or {}).get("name") != self.target.name:
            return f"for another target ({(manifest.target or {}).get('name')})"
        changed = [
            f"{name} {manifest.options.get(name)}, now {value}"
            for name, value in self.options.items()
            if manifest.options.get(name) != value
        ]
        if changed:
            return "with other options: " + "; ".join(changed)
        if manifest.made_by.get("canvasrt") != made_by()["canvasrt"]:
            return f"by another version of canvasrt ({manifest.made_by.get('canvasrt')})"
        if self.target.capability is not None:
            builder = self.target.builder
            before, now = manifest.made_by.get(builder), extras.version(builder)
            if now and before != now:
                return f"by {builder} {before}, and {now} is installed now"
        return ""

    def to_json(self) -> dict[str, Any]:
        """What `--dry-run` prints."""
        return {
            "source": {"path": str(self.source.path), "kind": self.source.made_from["kind"]},
            "target": self.target.name,
            "builder": self.target.builder,
            **self.options,
            "out": str(self.out),
            "layers": len(self.source.model.layers),
            "memory": self.memory.to_json(),
            "target_memory": self.target.memory,
            "fits": self.fits,
        }


def read_source(source: Path | str, progress: Progress | None = None) -> Source:
    """Open a checkpoint or a graph bundle and hash it, once for all targets."""
    report = progress or no_progress
    path = Path(source).expanduser()
    if (path / MANIFEST).exists():
        bundle = load_bundle(
            path, kind="graphs", progress=lambda done, total: report("checking graphs", done, total)
        )
        made_from = {"kind": "graphs", "digest": bundle.manifest.digest}
        return Source(path, bundle.manifest.model, made_from, bundle)
    folder = checkpoints.resolve(str(source))
    model, _ = ModelConfig.from_checkpoint(folder)
    hashes = checkpoints.fingerprint(
        folder, lambda done, total: report("hashing the checkpoint", done, total)
    )
    return Source(folder, model, {"kind": "checkpoint", "files": hashes}, None)


def graphs_precision(source: Path | str) -> str | None:
    """The precision of a graph bundle, read from its manifest alone; None for a checkpoint."""
    path = Path(source).expanduser()
    if not (path / MANIFEST).exists():
        return None
    return precision_of(load_bundle(path, kind="graphs", check=False))


def precision_of(graphs: Bundle) -> str:
    """What a graph bundle's networks compute in."""
    return graphs.manifest.options.get("precision", "fp32")


def choose_precision(target: Target, asked: str | None, of_graphs: str | None) -> str:
    """What to build at. UsageError names the valid ones when the target has not what was asked for."""
    if asked is None and of_graphs in target.precisions:
        return of_graphs
    return check_precision(target, asked)


def plan(
    source: Source,
    target: Target | str,
    out: Path | str,
    precision: str | None = None,
    max_context: int | None = None,
    max_batch: int = DEFAULT_MAX_BATCH,
) -> Plan:
    """Check the options of a build against the model and the target.

    Without a `precision` it is that of the graphs, where the target has it, or the target's first.
    """
    target = find_target(target) if isinstance(target, str) else target
    model = source.model
    limit = model.max_position_embeddings
    context = min(limit, DEFAULT_MAX_CONTEXT) if max_context is None else max_context
    if context > limit:
        raise CanvasError(
            f"--max-context {context} is more than the model's {limit} positions",
            f"give at most {limit}",
        )
    if context <= model.canvas_length:
        raise CanvasError(
            f"--max-context {context} leaves no room for a prompt beside one canvas of"
            f" {model.canvas_length} tokens",
            f"give at least {model.canvas_length + 1}",
        )
    if max_batch < 1:
        raise CanvasError(f"--max-batch {max_batch} is less than 1", "give 1 or more")
    return Plan(
        source,
        target,
        choose_precision(target, precision, source.precision),
        context,
        max_batch,
        Path(out).expanduser(),
    )
