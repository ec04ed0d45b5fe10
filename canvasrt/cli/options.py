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
EnginesPath = Annotated[
    Path,
    typer.Argument(
        metavar="BUNDLE", show_default=False, help="A folder that `canvasrt build` wrote."
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
        metavar="NAME",
        show_default=False,
        help="The precision of the weights; without it, that of the graphs or the target's first.",
    ),
]
GraphPrecision = Annotated[
    str,
    typer.Option(
        "--precision",
        "-p",
        metavar="NAME",
        help="What the graphs compute in: fp32 for cpu, bf16 for GPU targets.",
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
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan and whether it fits in memory; write nothing."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
