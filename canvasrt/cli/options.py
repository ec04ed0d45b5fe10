"""Arguments and options that several commands share, each defined once."""

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        show_default=False,
        help="A folder in the Hugging Face layout, a hub name, or the word demo.",
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT_OR_GRAPHS",
        show_default=False,
        help="A checkpoint (folder, hub name or demo), or a folder that `canvasrt export` wrote.",
    ),
]
BundlePath = Annotated[
    Path,
    typer.Argument(
        metavar="BUNDLE",
        show_default=False,
        help="A folder that `canvasrt export`, `build` or `package` wrote.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "-o",
        "--out",
        metavar="DIR",
        show_default=False,
        help="The folder to write. It must not hold anything yet.",
    ),
]
Targets = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        metavar="NAME[,NAME...]",
        show_default=False,
        help="What to build for; `canvasrt targets` lists the names. Several: one bundle each.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        "-p",
        metavar="NAME|FILE",
        show_default=False,
        help="What the weights become: fp32, bf16, a quantization recipe's name (fp8, nvfp4,"
        " nvfp4-mixed, nvfp4-experts), or a YAML file of your own. Without it: as in the source, or the target's first.",
    ),
]
GraphPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        "-p",
        metavar="NAME",
        show_default=False,
        help="What the graphs compute in: fp32 for cpu, bf16 for GPU targets. Without it fp32, or, of a checkpoint"
        " that is quantized, as it is.",
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="DIR[=WEIGHT]",
        show_default=False,
        help="A PEFT LoRA adapter to merge in, scaled by WEIGHT or else 1; may be given several times.",
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        metavar="TOKENS",
        min=1,
        show_default=False,
        help="The longest prompt plus answer; without it, the model's limit or 32768.",
    ),
]
MaxBatch = Annotated[
    int,
    typer.Option(
        "--max-batch", metavar="N", min=1, help="How many requests are denoised together."
    ),
]
LayersPerSegment = Annotated[
    int | None,
    typer.Option(
        "--layers-per-segment",
        metavar="N",
        min=1,
        show_default=False,
        help="Layers of one engine; without it 6. Fewer take less memory to build.",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        show_default=False,
        help="Prompts (JSONL) that a quantization is calibrated on; without it, those of canvasrt.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan and whether it fits in memory; write nothing."),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        show_default="what the bundle was built for",
        help="Where to run; cuda takes plain graphs through ONNX Runtime.",
    ),
]
SharePasses = Annotated[
    bool,
    typer.Option(
        "--share-passes",
        help="On a GPU, run requests in shared passes: faster, and their last bits may depend on each other.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, show_default="every core", help="Number of CPU threads."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def adapters(values: list[str] | None) -> list[tuple[Path, float]]:
    """Folders and weights of `--adapter DIR[=WEIGHT]`; UsageError for a weight that is no number."""
    from canvasrt.errors import UsageError

    found = []
    for value in values or ():
        folder, equals, weight = value.rpartition("=")
        if not equals or Path(value).is_dir():
            folder, weight = value, "1"
        try:
            found.append((Path(folder), float(weight)))
        except ValueError:
            raise UsageError(
                f"--adapter {value}: {weight!r} is no number",
                "for example --adapter my-adapter=0.5",
            ) from None
    return found
