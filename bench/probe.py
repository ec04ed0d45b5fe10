"""Tests whether engines, canvasrt's kernels and ONNX Runtime's CUDA provider run on this machine's GPU.

It generates with the whole demo model, and compares tokens with the CPU's. Each try runs in a separate process, so that
a crash ends only that try.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench import results
from canvasrt.defaults import SLOTTED, SORTED
from canvasrt.errors import CanvasError, UsageError
from canvasrt.machine import gpus

TIMEOUT = 600
RAN = "it ran"  # part of the message of a try that completed on a GPU


def measure(
    modules: Annotated[str, typer.Option(help="What to try: engines, sorted, provider.")] = "",
    child: Annotated[tuple[str, str] | None, typer.Option("--try", hidden=True)] = None,
    out: results.Out = None,
) -> None:
    """Make each try and record its message. The exit code is 1 if no try completed."""
    if child:
        name, folder = child
        try:
            said = WHOLE[name](Path(folder))
        except Exception as error:
            lines = str(error).strip().splitlines()
            said = f"failed: {type(error).__name__}: {lines[0] if lines else ''}"
        print(json.dumps(said))
        return
    names = modules.split(",") if modules else [*WHOLE]
    if unknown := set(names) - set(WHOLE):
        known = ", ".join(WHOLE)
        raise UsageError(
            f"--modules names {min(unknown)}, which is unknown", f"give some of {known}"
        )
    figures: dict[str, list[dict[str, str]]] = {"outcomes": []}
    with tempfile.TemporaryDirectory(prefix="canvasrt-probe-") as folder:
        for name in names:
            print(f"trying {name}", file=sys.stderr, flush=True)
            figures["outcomes"].append({"tried": name, "generate": _in_a_process(name, folder)})
            results.write(figures, out)
    results.report(figures, out)
    if not any(RAN in each["generate"] for each in figures["outcomes"]):
        raise typer.Exit(1)


def _in_a_process(name: str, folder: str) -> str:
    """Make a try in a separate process. Return its message, or how the process ended."""
    command = [sys.executable, "-m", "bench", "probe", "--try", name, folder]
    try:
        done = subprocess.run(
            command, cwd=results.ROOT, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith('"'):
        return str(json.loads(lines[-1]))
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return f"ended with code {done.returncode}: {' '.join(last)}"


def _provider(folder: Path) -> str:
    """Run the demo through the CUDA provider; return whether its tokens equal the CPU's."""
    from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaBackend

    OrtCudaBackend()  # raises an error that names what is missing
    return _generated(_in_fp32(folder), folder, "cuda")


def _engines(folder: Path, experts: str = SLOTTED) -> str:
    """Run the demo through engines for this machine's GPU; return whether its tokens equal the CPU's in fp32."""
    from canvasrt.build.options import BuildOptions
    from canvasrt.pipeline import build_bundle
    from canvasrt.targets import TARGETS

    here = {gpu.capability for gpu in gpus()[:1]}
    target = next((target for target in TARGETS if target.capability in here), None)
    if target is None:
        raise CanvasError("this machine has no GPU, or no target has its capability", "")
    options = BuildOptions("bf16", experts=experts)
    bundle = build_bundle("demo", target, folder / experts, options)
    return f"{target.name}: {_generated(bundle.path, folder, None)}; {_returns(bundle.path)}"


def _returns(path: Path) -> str:
    """Time an encoding pass at a new shape, at the same shape again, and at that shape after a pass of another
    shape."""
    import time

    import numpy as np

    from canvasrt.runtime.open import open_model
    from canvasrt.runtime.passes import EncodeInput

    model, found = open_model(path, check=False), []
    for length in (64, 64, 128, 64, 128, 64):
        row = model.new_row()
        begin = time.perf_counter()
        model.encode([EncodeInput(row, np.arange(length))])
        found.append(f"{length}: {1e3 * (time.perf_counter() - begin):.1f}")
        model.release(row)
    return f"ms of encoding passes, in turn, by number of tokens: {', '.join(found)}"


def _in_fp32(folder: Path) -> Path:
    """Return the demo's graphs in fp32, exported once."""
    from canvasrt.export.graphs import export_graphs

    out = folder / "fp32"
    return out if out.exists() else export_graphs("demo", out).path


def _generated(path: Path, folder: Path, device: str | None) -> str:
    """Generate four requests alone, in shared passes, and on the CPU; return whether tokens agree.

    In shared passes, a request must get the same tokens whether it is alone or with others.
    """
    from canvasrt.runtime.generator import Generator
    from canvasrt.runtime.model import Model
    from canvasrt.runtime.open import open_model
    from canvasrt.runtime.request import Request
    from canvasrt.runtime.sampling_params import SamplingParams

    cpu = open_model(_in_fp32(folder), check=False)
    wanted = [
        Request(
            list(range(3, 40 + seed)),
            SamplingParams.from_defaults(cpu.sampler, cpu.config, seed=seed, max_new_tokens=64),
        )
        for seed in range(4)
    ]

    def tokens(model: Model, requests: Sequence[Request]) -> list[list[int]]:
        return [result.token_ids for result in Generator(model).run(requests)]

    apart, again = (tokens(open_model(path, check=False, device=device), wanted) for _ in range(2))
    sharing = open_model(path, check=False, device=device, share_passes=True)
    shared, alone = tokens(sharing, wanted), [tokens(sharing, [each])[0] for each in wanted]
    return (
        f"{RAN}; the same tokens a second time: {again == apart}; "
        f"in shared passes with and without company: {shared == alone}; "
        f"shared and apart: {shared == apart}; on the CPU in fp32: {apart == tokens(cpu, wanted)}"
    )


# What runs the demo → the function of that try.
WHOLE: dict[str, Callable[[Path], str]] = {
    "engines": _engines,
    SORTED: partial(_engines, experts=SORTED),  # canvasrt's kernels
    "provider": _provider,  # ONNX Runtime's CUDA provider
}
