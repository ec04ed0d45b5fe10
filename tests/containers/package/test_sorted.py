"""A package of engines with experts over sorted rows contains all their pieces, weights and compiled kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from canvasrt.build.options import BuildOptions
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.containers.package.package import package
from canvasrt.containers.package.sizes import estimate_of
from canvasrt.pipeline import plan_all
from canvasrt.sorted_rows.description import SortedSegment
from canvasrt.targets import parse_targets
from tests.conftest import Command

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
pytest.importorskip("triton", reason="needs canvasrt[sorted]")

TARGET = "rtx-4090"
OPTIONS = BuildOptions("bf16", max_context=1024, max_batch=1, experts="sorted")


@pytest.fixture(scope="module")
def pieces(
    plain_graphs: Bundle, tmp_path_factory: pytest.TempPathFactory, command: Command
) -> Bundle:
    """Engines in pieces, built in a child process, since in this one Triton (the language) may interpret instead of
    compiling."""
    out = tmp_path_factory.mktemp("pieces") / "engines"
    sizes = ("--max-context", OPTIONS.max_context, "--max-batch", OPTIONS.max_batch)
    line = ("build", plain_graphs.path, "-t", TARGET, "-o", out, "-p", OPTIONS.precision, *sizes)
    done = command(*line, "--experts", OPTIONS.experts)
    assert done.returncode == 0, done.stderr
    return load_bundle(out, kind="engines")


def parts(segment: SortedSegment) -> set[str]:
    """Return the files that the description of a segment names."""
    images = {image.file for each in segment.kernels.values() for image in each.values()}
    return {segment.weights, *images, *(file for file, _ in segment.pieces)}


def test_a_package_has_every_part_and_is_verified_with_them(
    pieces: Bundle, command: Command, tmp_path: Path
) -> None:
    made = package(pieces.path, tmp_path / "package")
    (body,) = [each for each in made.manifest.segments if "layers" in each]
    assert body["file"] == "engines/body_0.sorted.json"
    named = parts(SortedSegment.read(made.file(body["file"])))
    assert {Path(name).suffix for name in named} == {".engine", ".bin", ".cubin"}
    inside = json.loads((made.path / "image" / "manifest.json").read_text())["files"]
    for name in (*named, "body_0.sorted.json"):
        assert inside[f"engines/{name}"] == pieces.manifest.files[name]
    dockerfile = (made.path / "Dockerfile").read_text()
    assert re.search(r"^COPY .*\bengines\b", dockerfile, re.MULTILINE)
    assert command("verify", made.path).returncode == 0
    (kernel, *_) = made.path.glob("engines/*.cubin")
    content = kernel.read_bytes()
    kernel.unlink()  # a hard link to the bundle's file
    kernel.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = command("verify", made.path)
    assert done.returncode == 1
    assert kernel.name in done.stderr


def test_serving_needs_the_memory_that_was_planned(plain_graphs: Bundle, pieces: Bundle) -> None:
    """The estimate of a bundle equals the plan's, although sorted rows need other buffers than slots."""
    (planned,) = plan_all(plain_graphs.path, parse_targets(TARGET), "out", OPTIONS, check=False)
    assert estimate_of(pieces.manifest) == planned.memory
