"""Engines built for the kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.few_experts import few_experts
from canvasrt.build.plan import BuildOptions
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.defaults import SLOTTED
from canvasrt.pipeline import build_bundle
from tests.conftest import Command

OPTIONS = BuildOptions(max_context=4096, max_batch=4)

Released = Callable[..., Bundle]


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Released:
    """Return a function that builds engines of two sliding layers and a full one, once per recipe, target and form of the
    experts."""
    pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    folder = tmp_path_factory.mktemp("released")
    made: dict[tuple[str, str, str], Bundle] = {}

    def engines(recipe: str, target: str, experts: str = SLOTTED) -> Bundle:
        key = recipe, target, experts
        if key not in made:
            graphs, out = few_experts(recipe, folder), folder / "-".join(key)
            if experts == SLOTTED:
                build_bundle(graphs, target, out, OPTIONS)
            else:
                # In a process, where Triton the language compiles even if it interprets in this one.
                sizes = ("--max-context", OPTIONS.max_context, "--max-batch", OPTIONS.max_batch)
                line = ("build", graphs, "-t", target, "-o", out, *sizes, "--experts", experts)
                done = command(*line)
                assert done.returncode == 0, done.stderr
            made[key] = load_bundle(out, check=False)
        return made[key]

    return engines
