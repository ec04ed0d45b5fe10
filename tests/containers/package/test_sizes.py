"""Limits of time, memory and disk for pods and containers, which follow from the engines' target and size."""

from __future__ import annotations

from typing import Any

import pytest

from canvasrt.build.memory import CONTEXT_ON_HOST, Weights
from canvasrt.build.needs import builder_memory
from canvasrt.bundle import Bundle, Manifest
from canvasrt.containers.names import READY_TIMEOUT
from canvasrt.containers.package.image_settings import settings_for
from canvasrt.containers.package.sizes import (
    BUILD_SECONDS_PER_GB,
    ReplicaSizes,
    estimate_of,
    overhead,
    sizes_of,
)
from canvasrt.pass_shapes import plan_passes
from canvasrt.targets import find_target
from tests.helpers.configs import RELEASED
from tests.helpers.memory import estimate

GIB = 1 << 30


def engines_for(manifest: Manifest, name: str, **changed: Any) -> Manifest:
    """Return a manifest of the released model's engines for a target."""
    target = find_target(name)
    model = RELEASED
    weights = Weights(model, target.precision, on_cpu=name == "cpu").segments()
    files = {f"{each}.bin": {"sha256": "", "bytes": size} for each, size in weights.items()}
    options = {"precision": target.precision, "max_batch": 4, "max_context": 32768}
    described = {"name": name, "backend": target.builder, "builder_version": "1"}
    data = {
        **manifest.data,
        "kind": "engines",
        "model": model.to_json(),
        "options": options,
        "target": described,
        "files": files,
        "segments": [],
    }
    return Manifest({**data, **changed})


def sizes(manifest: Manifest, name: str) -> ReplicaSizes:
    return sizes_of(manifest, find_target(name), 4)


def test_a_cpu_holds_the_model_in_memory(engines: Bundle) -> None:
    manifest = engines_for(engines.manifest, "cpu")
    need = estimate(manifest.model, "fp32", 32768, 4, on_cpu=True).total
    assert sizes(manifest, "cpu").memory == overhead(manifest) + need
    demo = sizes(engines.manifest, "cpu")
    assert overhead(engines.manifest) < demo.memory < overhead(engines.manifest) + GIB
    assert demo.cpu < sizes(manifest, "cpu").cpu


def test_a_gpu_s_host_holds_one_engine_at_a_time(engines: Bundle) -> None:
    manifest = engines_for(engines.manifest, "rtx-5090")
    largest = max(entry["bytes"] for entry in manifest.files.values())
    contexts = CONTEXT_ON_HOST * estimate(manifest.model, "nvfp4", 32768, 4).contexts
    assert sizes(manifest, "rtx-5090").memory == overhead(manifest) + largest + contexts
    assert sizes(manifest, "rtx-5090").memory < 8 * GIB


def test_a_bundle_s_own_passes_decide_its_memory_and_time(engines: Bundle) -> None:
    manifest = engines_for(engines.manifest, "rtx-5090")
    passes = plan_passes(RELEASED, 8192, 2).to_json()
    listed = engines_for(engines.manifest, "rtx-5090", passes=passes)
    need = estimate(RELEASED, "nvfp4", 8192, 2)
    found = estimate_of(listed)
    assert (found.kv_cache, found.contexts) == (need.kv_cache, need.contexts)
    assert sizes(listed, "rtx-5090").startup < sizes(manifest, "rtx-5090").startup


def test_the_first_start_has_time_and_room_for_compiled_kernels(engines: Bundle) -> None:
    """Only TensorRT-RTX compiles kernels at the start, so it gets more time and space. Longer contexts get more
    time."""
    rtx, h100 = (
        sizes(engines_for(engines.manifest, name), name) for name in ("rtx-6000-ada", "h100")
    )
    assert rtx.startup >= h100.startup + 300
    assert rtx.cache > 2 * 300 * 10**6 + h100.cache
    short = {"precision": "fp8", "max_batch": 4, "max_context": 2048}
    shorter = engines_for(engines.manifest, "rtx-6000-ada", options=short)
    assert sizes(shorter, "rtx-6000-ada").startup < rtx.startup


def test_the_image_waits_as_long_as_the_chart_on_eight_gpus(engines: Bundle) -> None:
    one, other = (engines_for(engines.manifest, name) for name in ("rtx-4090", "rtx-6000-ada"))
    health = settings_for([one, other]).to_config()["Healthcheck"]
    found = sizes(one, "rtx-4090"), sizes(other, "rtx-6000-ada")
    assert health["StartPeriod"] == max(x.startup + 7 * x.further for x in found) * 10**9


@pytest.mark.parametrize("name", ["rtx-5090", "h100"])
def test_a_further_gpu_loads_and_tries_but_neither_hashes_nor_compiles(
    name: str, engines: Bundle
) -> None:
    manifest = engines_for(engines.manifest, name)
    found, total = sizes(manifest, name), sum(each["bytes"] for each in manifest.files.values())
    loading = total / 10**8
    assert loading < found.further < found.startup - 300 - loading + 1
    assert (found.further < found.startup - 600 - loading) == (name == "rtx-5090")
    assert not sizes(engines.manifest, "cpu").further


def test_long_contexts_have_time_for_their_trial(engines: Bundle) -> None:
    options = {"precision": "fp8", "max_context": 262144}
    long = sizes(engines_for(engines.manifest, "h100", options=options), "h100")
    assert long.further > sizes(engines_for(engines.manifest, "h100"), "h100").further + 60


def test_a_first_start_that_builds_has_memory_time_and_room_for_it(engines: Bundle) -> None:
    graphs = engines_for(
        engines.manifest, "h100", kind="graphs", target=None, segments=[], files={}
    )
    found = sizes(graphs, "h100")
    segments = Weights(graphs.model, "fp8").segments()
    assert found.memory >= max(builder_memory(*each) for each in segments.items())
    total = sum(segments.values())
    assert found.cache > 2 * total  # during an upgrade, old engines are still there
    assert found.startup > total / 1e9 * BUILD_SECONDS_PER_GB
    built = sizes(engines_for(engines.manifest, "h100"), "h100")
    assert built.startup < found.startup
    assert built.cache <= GIB


def test_a_small_model_has_the_time_that_its_server_allows(engines: Bundle) -> None:
    """The time limit of the image and of the chart is at least that of `serve`."""
    assert sizes(engines.manifest, "cpu").startup == READY_TIMEOUT
    assert sizes(engines_for(engines.manifest, "cpu"), "cpu").startup > 2 * READY_TIMEOUT


@pytest.mark.parametrize("name", ["cpu", "rtx-5090", "h100"])
def test_every_size_is_a_whole_number(engines: Bundle, name: str) -> None:
    found = sizes(engines_for(engines.manifest, name), name)
    assert all(
        type(value) is int and value > 0
        for key, value in vars(found).items()
        if key not in ("further", "contexts")
    )
    assert found.shared > 64 << 20  # 64 MiB are too few for Triton's tensors
    assert found.temporary > 2 << 20  # a server writes 2 MiB
