"""`canvasrt verify`: checks that a bundle is intact, and that its results match its checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli import options
from canvasrt.console import emit, progress, show_section, size
from canvasrt.defaults import MAX_SAMPLES, MAX_STEPS
from canvasrt.errors import CanvasError, UsageError

if TYPE_CHECKING:
    from canvasrt.bundle import Bundle

Checked = Annotated[
    Path,
    options.argument(
        "BUNDLE", "A folder or an image that `canvasrt export`, `build` or `package` wrote."
    ),
]
Reference = Annotated[
    str | None,
    options.option(
        "--reference",
        "CHECKPOINT",
        "Also compare the results with transformers on this checkpoint.",
    ),
]
Report = Annotated[
    Path | None,
    options.option(
        "--report",
        "DIR",
        "Write the measurements to this folder, as report.json and report.html.",
    ),
]
Questions = Annotated[
    int,
    typer.Option(
        "--questions",
        metavar="N",
        min=0,
        help="Ask N held-out questions per task of the demo; 0 asks none.",
    ),
]


Decisions = Annotated[
    str | None,
    options.option(
        "--decisions",
        "FILE",
        "Measure how well probabilities match the labels of the questions in a JSON Lines or YAML file, or of `demo`.",
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        "--samples",
        metavar="N",
        min=1,
        max=MAX_SAMPLES,
        help="Draws of noise to average over, per labelled question.",
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        metavar="N",
        min=1,
        max=MAX_STEPS,
        help="Denoising steps per read of a labelled question.",
    ),
]
Fit = Annotated[
    bool, typer.Option("--fit", help="Also fit a temperature for each type of question.")
]
Key = Annotated[
    Path | None,
    options.option(
        "--key",
        "FILE",
        "For an image: also check its signed provenance with this public key.",
    ),
]


def verify(
    context: typer.Context,
    bundle: Checked,
    reference: Reference = None,
    report: Report = None,
    questions: Questions = 25,
    decisions: Decisions = None,
    samples: Samples = 1,
    steps: Steps = 1,
    fit: Fit = False,
    key: Key = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a bundle's files. --reference also checks its results, --decisions its probabilities.

    The exit code is 1 if its results exceed the limits of its recipe or precision.
    """
    from canvasrt.bundle import load_bundle
    from canvasrt.checkpoints.description import describe
    from canvasrt.containers.image.verify import check_package, is_image

    if report is not None and reference is None and decisions is None:
        raise UsageError("--report needs --reference or --decisions", "add one of them")
    if reference is None:
        options.refuse(context, ("questions",), "needs --reference", "add --reference CHECKPOINT")
    if decisions is None:
        decided = ("samples", "steps", "fit")
        options.refuse(context, decided, "needs --decisions", "add --decisions FILE")
    if is_image(bundle):
        for name, given in (("--reference", reference), ("--decisions", decisions)):
            if given is not None:
                raise UsageError(
                    f"{name} does not support images", "verify the bundle instead of the image"
                )
        _verify_image(bundle, key)
        return
    if key is not None:
        raise UsageError(f"--key needs an image, and {bundle} is not an image", "leave out --key")
    if reference is not None or decisions is not None:
        from canvasrt import fidelity
        from canvasrt.fidelity.decisions import measure_decisions
    checkpoint = None if reference is None else describe(reference)
    quality: dict[str, Any] | None = None
    read: dict[str, Any] | None = None
    with progress():
        found = load_bundle(bundle)
        check_package(found)
        if report is not None:
            fidelity.check_report_folder(report)
        if decisions is not None:
            read = measure_decisions(found, decisions, samples, steps, fit)
        if checkpoint is not None:
            quality = fidelity.measure_quality(found, checkpoint, questions)
            quality |= {"decisions": read} if read else {}
    if report is not None and quality is not None:
        fidelity.write_report(quality, f"{bundle.name} against {reference}", report)
    elif report is not None and read is not None:
        fidelity.write_decisions(read, f"{bundle.name} on {decisions}", report)
    _show(found, quality, read, reference, report)
    if quality is not None and not quality["ok"]:
        manifest = found.manifest
        check = "check that it was made from this checkpoint"
        if manifest.options.get("adapters") or manifest.made_from.get("adapters"):
            check = (
                "adapters are merged into it: compare it with what PEFT's merge_and_unload() saves"
            )
        raise CanvasError(
            f"{bundle} does not compute what {reference} does: {fidelity.failures(quality)}",
            f"{check}; --report DIR shows the largest differences",
        )


def _show(
    bundle: Bundle,
    quality: dict[str, Any] | None,
    read: dict[str, Any] | None,
    reference: str | None,
    report: Path | None,
) -> None:
    manifest, unlisted = bundle.manifest, bundle.unlisted()
    data: dict[str, Any] = {
        "bundle": str(bundle.path),
        "ok": quality is None or quality["ok"],
        "kind": manifest.kind,
        "digest": manifest.digest,
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
        "unlisted": unlisted,
    }
    if quality is not None:
        from canvasrt.fidelity import finite

        data["quality"] = finite({k: v for k, v in quality.items() if k != "decisions"})
    if read is not None:
        data["decisions"] = read

    def render(console: Any) -> None:
        console.print(
            f"{bundle.path}: {len(manifest.files)} files, {size(manifest.total_bytes)}, all match the manifest"
        )
        if unlisted:
            console.print(f"not in the manifest, and unused: {', '.join(unlisted)}")
        if quality is not None:
            _draw(console, quality, str(reference))
        if read is not None:
            _draw_decisions(console, read)
        if report is not None:
            console.print(f"report: {report / 'report.html'}")

    emit(data, render)


def _draw(console: Any, quality: dict[str, Any], reference: str) -> None:
    """Print the verdict, the limits, and the largest differences."""
    from canvasrt.fidelity.sections import BRIEF, sections, small, verdict

    overall = quality["steps"]["all"]
    console.print(
        f"against {reference}: {overall['argmax_agreement']:.2%} of {overall['positions']:,} positions have the same"
        f" best token; the entropy differs by {small(overall['entropy_error_mean'])} nats on average,"
        f" at most by {small(overall['entropy_error_max'])}"
    )
    for each in sections({**quality, "decisions": None}):
        if each["title"] in BRIEF:
            show_section(console, {**each, "note": ""})
    console.print(f"\n{verdict(quality)}")


def _draw_decisions(console: Any, read: dict[str, Any]) -> None:
    """Print the measured quality of the probabilities."""
    from canvasrt.fidelity import reliability

    for each in reliability.reliability_sections(read):
        show_section(console, {**each, "note": ""})
    console.print(reliability.calibration_verdict(read))


def _verify_image(path: Path, key: Path | None) -> None:
    """Check an image that `canvasrt package` wrote: its layers, its package and, if there is a `key`, its signature."""
    from canvasrt.containers.image.verify import verify_image

    with progress():
        found = verify_image(path, key)
    data = {
        "image": str(path),
        "ok": True,
        "digest": found.manifest.digest,
        "layers": found.layers,
        "bytes": found.bytes,
        "files": len(found.manifest.files),
        "components": found.components,
        "provenance": found.provenance and dict(found.provenance),
    }

    def render(console: Any) -> None:
        console.print(
            f"{path}: {found.layers} layers, {size(found.bytes)}; {len(found.manifest.files)} files of"
            f" the package and {found.components} components in its bill of materials, all intact",
        )
        if (provenance := found.provenance) is not None:
            given = provenance["buildDefinition"]["externalParameters"]
            console.print(f"signed by {key}: {given['tag']} on {given['base']}")

    emit(data, render)
