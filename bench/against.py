"""Runs `canvasrt bench --against transformers` for several numbers of threads, and prints one table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench import results
from canvasrt.types import Json


def measure(
    bundle: Path,
    checkpoint: Annotated[str, typer.Option(help="The bundle's checkpoint.")] = "demo",
    threads: list[int] = [1, 2],  # noqa: B006
    steps: int = 16,
    blocks: int = 4,
    rounds: int = 5,
    out: results.Out = None,
) -> None:
    """Alternate canvasrt and transformers on the same fp32 weights. The ratio compares their tokens per second."""
    sizes = ["--steps", str(steps), "--blocks", str(blocks), "--rounds", str(rounds)]
    command = [sys.executable, "-m", "canvasrt", "bench", str(bundle), *sizes, "--json"]
    command += ["--against", "transformers", "--checkpoint", checkpoint]
    rows = []
    for each in threads:
        line = [*command, "--threads", str(each)]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout)
        rows.append(
            {"bundle": bundle.name, "steps": steps, "blocks": blocks, "threads": each} | _row(found)
        )
    results.report({"rounds": rows}, out)


def _row(found: Json) -> Json:
    ours, theirs, ratio = found["canvasrt"], found["transformers"], found["ratio"]
    return {
        "pass, ms": ours["forward_ms"]["median"],
        "transformers": theirs["forward_ms"]["median"],
        "first block, ms": ours["first_tokens_ms"]["median"],
        "of transformers": theirs["first_tokens_ms"]["median"],
        "ratio": ratio["median"],
        "lowest": ratio["min"],
        "highest": ratio["max"],
    }
