"""A CPU runs the very codes and scales that a GPU's engines are built from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from canvasrt.build import plan as planning
from canvasrt.build.graph_keys import quantized_from
from canvasrt.build.options import BuildOptions
from canvasrt.bundle import Bundle
from canvasrt.graphs import lowbits
from canvasrt.graphs import lower as lowering
from canvasrt.pipeline import build_all, build_bundle, graphs_of, plan_all
from canvasrt.targets import parse_targets
from tests.helpers import library


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """The graphs that engines for a GPU are built from, and the CPU's bundle."""
    cpu, gpu = plan_all(
        "demo", parse_targets("cpu,rtx-4090"), tmp_path_factory.mktemp("out"), BuildOptions("int4")
    )
    assert quantized_from(cpu) == quantized_from(gpu)
    ((_, bundle),) = build_all([cpu])
    return graphs_of(gpu), bundle


def bytes_of(file: Path) -> dict[str, bytes]:
    """Return the bytes of each external initializer of a graph, by name."""
    found = {}
    for name, value in ir.load(file).graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            data = (file.parent / tensor.location).read_bytes()
            start = tensor.offset or 0
            found[name] = data[start : start + (tensor.length or len(data))]
    return found


def joined(stored: dict[str, bytes], name: str) -> bytes:
    """A tensor, joined if it was cut into parts."""
    if name in stored:
        return stored[name]
    parts = {int(key.rpartition(".")[2]): key for key in stored if key.startswith(f"{name}.")}
    return b"".join(stored[parts[number]] for number in sorted(parts))


def test_codes_and_scales_are_the_same(pair: tuple[Bundle, Bundle]) -> None:
    graphs, cpu = pair
    compared = 0
    for entry in graphs.manifest.segments:
        if "layers" not in entry:
            continue
        packed, lowered = (bytes_of(each.file(entry["file"])) for each in (graphs, cpu))
        for name in entry["quantized"]:
            (own,) = (each for each in packed if each.startswith(name) and ".values" in each)
            stem = own.removesuffix(".values")
            codes = np.frombuffer(joined(lowered, f"{stem}.codes"), np.uint8)
            # The CPU's codes have 8 added to make them unsigned, which flips their highest bit.
            assert (codes ^ 0x88).tobytes() == packed[own], name
            scales = np.frombuffer(packed[f"{stem}.block_scales"], np.uint16)
            wide = np.frombuffer(joined(lowered, f"{stem}.scales"), np.float32)
            assert np.array_equal(wide, lowbits.from_bf16(scales).reshape(-1)), name
            compared += 1
    assert compared == 6 * len(graphs.manifest.model.layers)


def test_large_graphs_go_as_they_are_lowered(
    pair: tuple[Bundle, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted build goes on after the last graph that was lowered."""
    cache, done, lower = tmp_path / "cache", list[str](), lowering.lower_graph
    monkeypatch.setenv("CANVASRT_CACHE", str(library.empty_cache(cache)))
    monkeypatch.setattr(planning, "KEPT_GRAPHS", 0)

    def interrupted(source: Path, out: Path) -> None:
        done.append(source.stem)
        if done == ["body_0", "head"]:
            raise KeyboardInterrupt
        lower(source, out)

    monkeypatch.setattr(lowering, "lower_graph", interrupted)
    out, options = tmp_path / "out", BuildOptions("int4")
    with pytest.raises(KeyboardInterrupt):
        build_bundle("demo", "cpu", out, options)
    weights = {each.name for each in cache.glob("graphs/*/*.bin")}
    assert "body_0.bin" not in weights
    assert "head.bin" in weights
    made = build_bundle("demo", "cpu", out, options)
    assert done == ["body_0", "head", "head", "vision"]
    assert not any(cache.glob("graphs/*/body_*.bin"))
    assert not any(cache.glob("lowerings/*"))
    assert made.manifest.digest == pair[1].manifest.digest


def test_the_table_is_the_same(pair: tuple[Bundle, Bundle]) -> None:
    graphs, cpu = pair
    ours, theirs = (each.manifest.embedding for each in (cpu, graphs))
    assert ours["dtype"] == theirs["dtype"] == "int8"
    size = np.prod(theirs["shape"])
    files = [each.file(each.manifest.embedding["file"]).read_bytes() for each in (cpu, graphs)]
    assert files[0][:size] == files[1][:size]
    scales = np.frombuffer(files[1][theirs["scale"]["offset"] :], np.uint16)
    wide = np.frombuffer(files[0][ours["scale"]["offset"] :], np.float32)
    assert np.array_equal(wide, lowbits.from_bf16(scales))
