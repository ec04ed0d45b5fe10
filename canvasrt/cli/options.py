"""Arguments and options that several commands share."""

import contextlib
import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt.console import choose_json
from canvasrt.defaults import (
    LAYERS_PER_SEGMENT,
    MAX_CONTEXT,
    MAX_THREADS,
    SHORT_SEGMENT,
    SLOTTED,
    SORTED,
)
from canvasrt.errors import CanvasError, UsageError
from canvasrt.recipes import SHIPPED

_HOST_PORT = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\]):\d+(/.*)?")


def argument(metavar: str, help: str) -> Any:
    """Return a command's argument. The help does not show the argument's default."""
    return typer.Argument(metavar=metavar, show_default=False, help=help)


def option(flags: str, metavar: str, help: str, **more: Any) -> Any:
    """Return an option. Commas separate `flags`. The help shows the default only if `more` asks for it."""
    more = {"show_default": False, **more}
    return typer.Option(*flags.split(", "), metavar=metavar, help=help, **more)


Checkpoint = Annotated[
    str,
    argument("CHECKPOINT", "A folder in the Hugging Face layout, a hub name, demo or demo-vision."),
]
Source = Annotated[
    str,
    argument(
        "CHECKPOINT_OR_GRAPHS",
        "A checkpoint (folder, hub name, demo or demo-vision), or graphs that `canvasrt export` wrote.",
    ),
]
BundlePath = Annotated[
    Path,
    argument("BUNDLE", "A folder that `canvasrt export`, `build` or `package` wrote."),
]
ServedBundle = Annotated[
    Path | None,
    argument("BUNDLE", "A folder that `canvasrt package` or `build` wrote; NIM_MODEL_PATH."),
]
Out = Annotated[
    Path,
    option("-o, --out", "DIR", "The folder to write, which must be empty."),
]
BuildOut = Annotated[
    Path,
    option(
        "-o, --out",
        "DIR",
        "The folder to write. It must be empty, or hold an earlier build with the same options.",
        show_default=True,
    ),
]
Targets = Annotated[
    str,
    option(
        "--target, -t",
        "NAME[,NAME...]",
        "The targets to build for; see `canvasrt targets`. Each target gets its own bundle.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        "-p",
        metavar="NAME|FILE",
        show_default="the source's, or the target's first",
        help=f"Precision of the weights: fp32, bf16, a quantization recipe ({', '.join(SHIPPED)}),"
        " or a YAML file with your own recipe.",
    ),
]
GraphPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        "-p",
        metavar="NAME",
        show_default="fp32, or the quantized checkpoint's",
        help="Precision of the graphs: fp32 for cpu, bf16 for GPU targets.",
    ),
]
Adapter = Annotated[
    list[str] | None,
    option(
        "--adapter",
        "DIR[=WEIGHT]",
        "A PEFT LoRA adapter to merge, scaled by WEIGHT (default 1); may be given several times.",
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        metavar="TOKENS",
        min=1,
        show_default=f"the model's limit, at most {MAX_CONTEXT}",
        help="Maximum tokens per request, prompt plus answer.",
    ),
]
MaxBatch = Annotated[
    int,
    typer.Option(
        "--max-batch",
        metavar="N",
        min=1,
        max=1024,
        help="Maximum number of requests denoised together.",
    ),
]
LayersPerSegment = Annotated[
    int | None,
    typer.Option(
        "--layers-per-segment",
        metavar="N",
        min=1,
        show_default=f"{LAYERS_PER_SEGMENT}; a build takes {SHORT_SEGMENT} if {LAYERS_PER_SEGMENT} need over 10 GB",
        help="Layers per engine. Fewer layers need less memory to build.",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        show_default="canvasrt's own",
        help="JSONL file of calibration prompts.",
    ),
]
Experts = Annotated[
    str,
    typer.Option(
        "--experts",
        metavar=f"{SLOTTED}|{SORTED}",
        help=f"How a GPU runs experts. {SLOTTED}: inside the engines, in slots. {SORTED}: between engines, in kernels over sorted tokens.",
    ),
]
KeepGraphs = Annotated[
    bool,
    typer.Option(
        "--keep-graphs",
        help="Keep large graphs in the cache, for other targets and later builds for a CPU. Without this option, a build deletes the weights of large graphs once their engines exist.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the plan and whether it fits into memory; write nothing."
    ),
]


def _check_device(device: str | None) -> str | None:
    if device is not None:
        from canvasrt.runtime.open import check_device

        check_device(device)
    return device


Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        callback=_check_device,
        metavar="cpu|cuda",
        show_default="the bundle's",
        help="Where to run. cuda runs graphs through ONNX Runtime.",
    ),
]
SharePasses = Annotated[
    bool,
    typer.Option(
        "--share-passes",
        help="On a GPU, let requests share passes; every pass then has the shape of a full batch.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=MAX_THREADS,
        show_default="every core",
        help="Number of CPU threads.",
    ),
]
# The callback stores the choice for `emit`, so commands need not pass it on.
AsJson = Annotated[
    bool, typer.Option("--json", callback=choose_json, help="Print the result as JSON.")
]


def refuse(context: typer.Context, names: Collection[str], reason: str, hint: str) -> None:
    """Raise UsageError if the command line sets one of the parameters `names`, which would have no effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            option = next(each for each in parameter.opts if each.startswith("--"))
            raise UsageError(f"{option} {reason}", hint)


def adapters(values: list[str] | None) -> list[tuple[Path, float]]:
    """Parse `--adapter DIR[=WEIGHT]` into folders and weights. Raises UsageError for a weight that is not a number."""
    found = []
    for value in values or ():
        folder, equals, weight = value.rpartition("=")
        if not equals or Path(value).expanduser().is_dir():
            folder, weight = value, "1"
        number = math.nan
        with contextlib.suppress(ValueError):
            number = float(weight)
        if not math.isfinite(number):
            raise UsageError(
                f"--adapter {value}: {weight!r} is not a finite number",
                "give DIR=WEIGHT, such as --adapter my-adapter=0.5",
            )
        found.append((Path(folder).expanduser(), number))
    return found


def read_option(read: Callable[[], Any]) -> Any:
    """Return `read()`, an option's value. Raises UsageError for an invalid value; the message names the option."""
    try:
        return read()
    except CanvasError as error:
        raise UsageError(f"--{error.message}", error.hint) from None


def is_url(subject: str) -> bool:
    """Return whether a command's argument is an address (a URL or HOST:PORT) rather than a bundle."""
    if subject.startswith(("http://", "https://")):
        return True
    return bool(_HOST_PORT.fullmatch(subject)) and not Path(subject).exists()


def as_url(address: str) -> str:
    """Return the URL of an address for which `is_url` is true. If the address has no scheme, `http://` is added."""
    return address if "://" in address else f"http://{address}"
