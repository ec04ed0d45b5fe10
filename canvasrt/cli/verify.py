"""`canvasrt verify`: checks that a bundle is intact, and that it computes what its checkpoint
does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli import options
from canvasrt.console import emit, progress, size
from canvasrt.defaults import MAX_SAMPLES, MAX_STEPS

if TYPE_CHECKING:
    from canvasrt.bundle import Bundle

Checked = Annotated[
    Path,
    typer.Argument(
        metavar="BUNDLE",
        show_default=False,
        help="A folder or an image that `canvasrt export`, `build` or `package` wrote.",
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="CHECKPOINT",
        show_default=False,
        help="Also compare the results with transformers on this checkpoint.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="DIR",
        show_default=False,
        help="Write what is measured to this folder, as report.json, report.md and report.html.",
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
    typer.Option(
        "--decisions",
        metavar="FILE",
        show_default=False,
        help="Measure probabilities on labelled questions: JSON Lines or YAML, or demo.",
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
    typer.Option("--steps", metavar="N", min=1, max=MAX_STEPS, help="Steps per labelled read."),
]
Fit = Annotated[
    bool, typer.Option("--fit", help="Also fit a temperature for each type of question.")
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        show_default=False,
        help="For an image: also check its provenance, signed with the private key that matches this one.",
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

    The exit code is 1 when the limits of its recipe or precision are exceeded.
    """
    from canvasrt.checkpoints.locate import find_checkpoint
    from canvasrt.containers.image.verify import is_image
    from canvasrt.errors import CanvasError, UsageError

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
        _verify_image(bundle, key, as_json)
        return
    if key is not None:
        raise UsageError(f"--key needs an image, and {bundle} is not one", "leave out --key")
    checkpoint = None if reference is None else find_checkpoint(reference)
    found, quality, read = _check(
        bundle,
        None if checkpoint is None else (checkpoint, questions),
        None if decisions is None else (decisions, samples, steps, fit),
        report,
        f"against {reference}" if reference else f"on {decisions}",
    )
    _show(found, quality, read, reference, report, as_json)
    if quality is not None and not quality["ok"]:
        from canvasrt.fidelity import failures

        raise CanvasError(
            f"{bundle} does not compute what {reference} does: {failures(quality)}",
            "check that it was made from this checkpoint; --report DIR shows the largest differences",
        )


def _check(
    path: Path,
    compare: tuple[Path, int] | None,
    decide: tuple[str, int, int, bool] | None,
    report: Path | None,
    title: str,
) -> tuple[Bundle, dict[str, Any] | None, dict[str, Any] | None]:
    """Check the files; compare with a checkpoint, by so many questions; ask a file's labelled questions, with
    so many samples and steps, and fit a temperature."""
    from canvasrt.bundle import load_bundle
    from canvasrt.containers.image.verify import check_package

    quality = read = None
    with progress() as show:
        found = load_bundle(path, progress=lambda done, total: show("checking files", done, total))
        check_package(found)
        if report is not None:
            from canvasrt.fidelity import check_report_folder

            check_report_folder(report)
        if decide is not None:
            file, samples, steps, fit = decide
            from canvasrt.fidelity.decisions import ReadSettings, measure_decisions

            read = measure_decisions(found, file, ReadSettings(samples, steps), fit, show)
        if compare is not None:
            from canvasrt.fidelity import measure_quality

            quality = measure_quality(found, *compare, show) | ({"decisions": read} if read else {})
    if report is not None:
        from canvasrt.fidelity import write_decisions, write_report

        if quality is not None:
            write_report(quality, f"{path.name} {title}", report)
        elif read is not None:
            write_decisions(read, f"{path.name} {title}", report)
    return found, quality, read


def _show(
    bundle: Bundle,
    quality: dict[str, Any] | None,
    read: dict[str, Any] | None,
    reference: str | None,
    report: Path | None,
    as_json: bool,
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

    emit(data, as_json, render)


def _draw(console: Any, quality: dict[str, Any], reference: str) -> None:
    """Print the verdict, the limits, and the largest differences."""
    from canvasrt.console import table
    from canvasrt.fidelity import markdown

    overall = quality["steps"]["all"]
    console.print(
        f"against {reference}: {overall['argmax_agreement']:.2%} of {overall['positions']:,} positions have the same"
        f" best token; the entropy differs by {markdown.small(overall['entropy_error_mean'])} nats on average,"
        f" at most by {markdown.small(overall['entropy_error_max'])}"
    )
    for title, heads, rows in (
        ("Limits", ("", "measured", "limit", ""), markdown.limit_rows(quality)),
        ("Denoising steps", markdown.STEP_HEADS, markdown.step_rows(quality)),
        ("Exact answers", markdown.ANSWER_HEADS, markdown.answer_rows(quality)),
        ("Pace", markdown.PACE_HEADS, markdown.pace_rows(quality)[-2:]),
        ("Layers, worst first", markdown.LAYER_HEADS, markdown.layer_rows(quality)),
        ("Experts, worst first", markdown.EXPERT_HEADS, markdown.expert_rows(quality)),
    ):
        if rows:
            console.print(f"\n[bold]{title}[/bold]")
            plain = [[cell.strip("*") for cell in row] for row in rows]
            console.print(table(heads, plain))
    console.print(f"\n{markdown.verdict(quality)}")


def _draw_decisions(console: Any, read: dict[str, Any]) -> None:
    """Print how good the probabilities are."""
    from canvasrt.console import table
    from canvasrt.fidelity import reliability

    console.print(table(reliability.HEADS, reliability.rows(read)))
    if read["fit"]:
        console.print(table(reliability.FIT_HEADS, reliability.fit_rows(read)))
    console.print(reliability.calibration_verdict(read))


def _verify_image(path: Path, key: Path | None, as_json: bool) -> None:
    """Check an image that `canvasrt package` wrote: its layers, the package inside, and with `key`
    who signed it."""
    from canvasrt.containers.image.attest import check_attestation
    from canvasrt.containers.image.verify import verify_image

    with progress() as show:
        found = verify_image(path, show)
    provenance = None if key is None else dict(check_attestation(path, found.digest, key))
    data = {
        "image": str(path),
        "ok": True,
        "digest": found.manifest.digest,
        "layers": found.layers,
        "bytes": found.bytes,
        "files": len(found.manifest.files),
        "components": found.components,
        "provenance": provenance,
    }

    def render(console: Any) -> None:
        console.print(
            f"{path}: {found.layers} layers, {size(found.bytes)}; {len(found.manifest.files)} files of"
            f" the package and {found.components} components in its bill of materials, all intact",
            markup=False,
        )
        if provenance is not None:
            given = provenance["buildDefinition"]["externalParameters"]
            console.print(f"signed by {key}: {given['tag']} on {given['base']}", markup=False)

    emit(data, as_json, render)
