"""Finds what a build can reuse: finished bundles, cached graphs and engines, and files of an interrupted build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from canvasrt import extras
from canvasrt.build import cpu, tensorrt
from canvasrt.build.plan import DEFAULT_VALUES, Plan
from canvasrt.bundle import MANIFEST, Bundle, Manifest, load_bundle, made_by
from canvasrt.cache import GraphCache, known_hashes, unfinished_folder
from canvasrt.calibration_prompts import CALIBRATED, CALIBRATIONS, QUANTIZATIONS
from canvasrt.errors import CanvasError


@dataclass(frozen=True)
class Work:
    """The plans of one source, and what earlier builds have left for them.

    Attributes:
        bundles: for each plan, its finished bundle; None if there is none yet.
        missing: the plans without a bundle, which are to be built.
        graphs: for each precision of missing plans (`Precision.text`), their graphs (see `reusable_graphs`).
        calibrated: the precisions whose calibration result is in the cache, although their graphs are not.
    """

    plans: Sequence[Plan]
    bundles: Sequence[Bundle | None]
    missing: Sequence[Plan]
    graphs: Mapping[str, Bundle | None]
    calibrated: frozenset[str]


def find_work(plans: Sequence[Plan]) -> Work:
    """Find what earlier builds have left. Raises CanvasError if a plan's output folder holds a different bundle."""
    bundles = [existing(plan) for plan in plans]
    missing = [plan for plan, found in zip(plans, bundles, strict=True) if found is None]
    graphs = reusable_graphs(missing)
    calibrated = {
        kind
        for kind, (plan, *_) in by_precision(missing).items()
        if plan.needs.calibration and graphs[kind] is None and is_calibrated(plan)
    }
    return Work(plans, bundles, missing, graphs, frozenset(calibrated))


def existing(plan: Plan) -> Bundle | None:
    """Return the bundle at a plan's `out` if the build would write the same bundle; None if `out` contains no bundle.

    Raises CanvasError if a different bundle is there.
    """
    if not (plan.out / MANIFEST).exists():
        return None
    found = load_bundle(plan.out, kind="engines", check=False)
    if difference := difference_from(plan, found.manifest):
        raise CanvasError(
            f"{plan.out} holds engines made {difference}",
            "name another folder with -o, or remove this one first",
        )
    return load_bundle(plan.out, kind="engines", hasher=known_hashes)


def difference_from(plan: Plan, manifest: Manifest) -> str:
    """Return a text that says how engines with this manifest differ from a plan's engines; empty if they do not."""
    if manifest.made_from.get("source") != plan.source.made_from:
        return "from another checkpoint or other graphs"
    if (manifest.target or {}).get("name") != plan.target.name:
        return f"for another target ({(manifest.target or {}).get('name')})"
    wanted, made = (DEFAULT_VALUES | each for each in (plan.options, manifest.options))
    changed = [
        _change(name, made.get(name), wanted[name])
        for name in wanted
        if made.get(name) != wanted[name]
    ]
    if changed:
        return "with other options: " + "; ".join(changed)
    if manifest.made_by.get("canvasrt") != made_by()["canvasrt"]:
        return f"by another version of canvasrt ({manifest.made_by.get('canvasrt')})"
    builder = [plan.target.builder] if plan.target.capability is not None else []
    packages = dict.fromkeys(builder, "by") | dict.fromkeys(
        plan.experts.packages, "with kernels by"
    )
    for package, how in packages.items():
        before, now = manifest.made_by.get(package), extras.version(package)
        if now and before != now:
            return f"{how} {package} {before}, but {now} is installed now"
    return ""


def _change(name: str, before: Any, now: Any) -> str:
    if isinstance(now, dict | list) or name == "calibration":
        return f"another {name}" if before and now else f"{'with' if before else 'without'} {name}"
    return f"{name} {before}, now {now}"


def by_precision(plans: Sequence[Plan]) -> dict[str, list[Plan]]:
    """Return the plans of one source by `Precision.text`. Plans of the same precision share their graphs."""
    kinds = dict.fromkeys(plan.precision.text for plan in plans)
    return {kind: [plan for plan in plans if plan.precision.text == kind] for kind in kinds}


def reusable_graphs(plans: Sequence[Plan]) -> dict[str, Bundle | None]:
    """Return the graphs of the plans of one source by `Precision.text`: the source's own graphs, or else cached
    graphs. They are None if the cache lacks a weight that one of the plans reads."""
    return {
        kind: same[0].given_graphs
        or GraphCache().find(same[0].graphs_from, partial(built_weights, same))
        for kind, same in by_precision(plans).items()
    }


def built_weights(plans: Sequence[Plan], graphs: Bundle) -> set[str]:
    """Return the weight files that no plan needs to read, because everything built from them is in the cache."""
    gone = [
        (cpu if each.target.capability is None else tensorrt).built_weights(each, graphs)
        for each in plans
    ]
    return set.intersection(*gone) if gone else set()


def is_calibrated(plan: Plan) -> bool:
    """Return whether an earlier build has left the result of this plan's calibration in the cache."""
    return any((folder / CALIBRATED).is_file() for folder in _quantizing(plan))


def held_bytes(plans: Sequence[Plan]) -> int:
    """Return the size, in bytes, of the cached files from which these plans would resume."""
    sizes = {}
    for folder in {folder for plan in plans for folder in _begun(plan)}:
        for file in folder.rglob("*"):
            stat = file.lstat()
            sizes[stat.st_ino] = stat.st_size  # a linked file counts once
    return sum(sizes.values())


def _begun(plan: Plan) -> Iterator[Path]:
    """Yield the folders of a plan's unfinished, finished and lowered graphs. They need not exist."""
    yield from _quantizing(plan)
    if found := GraphCache().find(plan.graphs_from, lambda bundle: bundle.manifest.files):
        yield found.path
        yield unfinished_folder(*cpu.lowered_from(found))


def _quantizing(plan: Plan) -> list[Path]:
    """Return the folders that keep a plan's progress in calibrating and in quantizing; none if the plan does not
    quantize. They need not exist."""
    work = {CALIBRATIONS: plan.calibration_work, QUANTIZATIONS: plan.quantization_work}
    return [unfinished_folder(kind, made_from) for kind, made_from in work.items() if made_from]
