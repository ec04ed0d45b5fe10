"""The TensorRT backend: what it refuses, and its contexts, profiles and CUDA graphs over a fake TensorRT."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.errors import CanvasError
from canvasrt.machine import gpus
from canvasrt.runtime.backends import tensorrt
from canvasrt.runtime.backends.tensorrt import TensorRTBackend, check_target
from canvasrt.runtime.bundle_facts import host_dtype
from canvasrt.runtime.engine import EngineCall
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.fake_tensorrt import (
    API,
    FakeCudaDevice,
    ProfilingVerbosity,
    engine_file,
    fake_tensorrt,
)
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, body_profiles, requests, same
from tests.helpers.tensorrt_api import borrowed, documented, parameters

VERSION = "1.7.1.116"
TARGET = {
    "name": "rtx-5090",
    "backend": "tensorrt-rtx",
    "builder_version": VERSION,
    "compute_capability": "12.0",
    "built_on": platform.machine(),
}
HERE: dict[str, Any] = {
    "version": VERSION,
    "capability": (12, 0),
    "machine": platform.machine(),
}


def test_the_right_engines_are_taken() -> None:
    check_target(TARGET, **HERE)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        ({"version": "1.8.0"}, r"built by tensorrt-rtx 1\.7\.1\.116, but 1\.8\.0 is installed"),
        ({"capability": (8, 9)}, r"rtx-5090, compute capability 12\.0, but the GPU here has 8\.9"),
    ],
)
def test_engines_of_another_builder_or_gpu_are_refused(here: dict[str, Any], words: str) -> None:
    with pytest.raises(CanvasError, match=words):
        check_target(TARGET, **(HERE | here))


def test_engines_for_several_capabilities_run_on_each_of_them() -> None:
    several = TARGET | {"name": "rtx", "compute_capability": "8.6, 8.9, 12.0"}
    for capability in ((8, 6), (8, 9), (12, 0)):
        check_target(several, **(HERE | {"capability": capability}))
    for capability in ((6, 8), (9, 1), (2, 0), (12, 1)):
        with pytest.raises(CanvasError, match=r"for rtx, compute capability 8\.6, 8\.9, 12\.0"):
            check_target(several, **(HERE | {"capability": capability}))


def test_tensorrt_s_engines_stay_on_the_architecture_of_their_host() -> None:
    other = TARGET | {"backend": "tensorrt", "built_on": "aarch64", "name": "h100"}
    with pytest.raises(CanvasError, match="built on aarch64, and this machine is x86_64"):
        check_target(other, **(HERE | {"machine": "x86_64"}))
    check_target(other | {"backend": "tensorrt-rtx"}, **(HERE | {"machine": "x86_64"}))


def write_engines(graphs: Bundle, folder: Path) -> None:
    """Write an engine bundle whose engine files contain the paths of graphs."""
    manifest, profiles = graphs.manifest, body_profiles()["body"]
    segments = []
    for entry in manifest.segments:
        file = f"{entry['name']}.engine"
        sizes = {"profiles": profiles} if "layers" in entry else {}
        (folder / file).write_bytes(engine_file(graphs.file(entry["file"]), sizes.get("profiles")))
        segments.append({**entry, "file": file, **sizes})
    shutil.copy(graphs.file(manifest.embedding["file"]), folder)
    write_manifest(
        folder,
        kind="engines",
        made_from={},
        options={"max_context": 2048},
        model=manifest.model,
        sampler=manifest.sampler,
        segments=segments,
        embedding=manifest.embedding,
        tokenizer=None,
        target=TARGET,
    )


class Engines:
    """A bundle's graphs behind engine files, as a fake TensorRT loads them."""

    def __init__(self, graphs: Path, folder: Path, rtx: bool, apart: bool = False) -> None:
        self.device = FakeCudaDevice()
        module = fake_tensorrt(VERSION, rtx, self.device)
        self.backend = TensorRTBackend(TARGET, apart, module, self.device)  # type: ignore[arg-type]
        write_engines(load_bundle(graphs, check=False), folder)
        model = open_model(folder, backend=self.backend)
        assert isinstance(model, DeviceModel)
        self.model = model

    def contexts(self, index: int = 0) -> list[Any]:
        return self.backend.engines[index]._engine.contexts


@pytest.mark.parametrize("rtx", [True, False], ids=["tensorrt_rtx", "tensorrt"])
def test_tokens_are_those_of_the_cpu(rtx: bool, tiny: Pair, prompt: Prompt, tmp_path: Path) -> None:
    """Requests take all steps, so the same calls repeat."""
    engines = Engines(tiny.graphs, tmp_path, rtx)
    wanted = requests(tiny, prompt, [40, 150, 9], max_new_tokens=3 * CANVAS, early_stop=False)
    same(Generator(engines.model).run(wanted), Generator(tiny.model).run(wanted))
    replayed = engines.device.replayed
    if rtx:
        assert not replayed
        kinds = {int(context.config.cuda_graph_strategy) for context in engines.contexts()}
        assert kinds == {0, 1}
    else:
        assert replayed > 10
        assert len(engines.contexts()) <= 2 + len(wanted)


def test_a_call_is_captured_when_it_comes_again(tiny: Pair, prompt: Prompt, tmp_path: Path) -> None:
    engines = Engines(tiny.graphs, tmp_path, rtx=False)
    (head,) = [each for each in engines.backend.engines if each.name == "head"]
    wanted = requests(tiny, prompt, [9], max_new_tokens=CANVAS, max_denoising_steps=5)
    same(Generator(engines.model).run(wanted), Generator(tiny.model).run(wanted))
    own = head._contexts[0, 0]
    assert own is not None
    assert own._graph is not None


def test_requests_share_no_pass_unless_they_are_let() -> None:
    """Sharing a batch may change last bits on a GPU, and tokens must depend on the seed alone."""
    device = FakeCudaDevice()
    module = fake_tensorrt(VERSION, True, device)
    assert TensorRTBackend(TARGET, module=module, device=device).rows_apart  # type: ignore[arg-type]


def test_a_place_keeps_one_graph(
    tiny: Pair, prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place keeps the graph of its latest call. It drops an older graph only once no queued work uses it."""
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 128)
    engines = Engines(tiny.graphs, tmp_path, rtx=False, apart=True)
    forget, queued = engines.device.forget, []

    def forgets(graph: int) -> None:
        queued.append(len(engines.device._queue))
        forget(graph)

    monkeypatch.setattr(engines.device, "forget", forgets)
    wanted = requests(tiny, prompt, [40, 300], early_stop=False, max_new_tokens=CANVAS)
    for order in (wanted, wanted[::-1]):
        same(Generator(engines.model).run(order), Generator(tiny.model).run(order))
    assert queued
    assert not any(queued)
    assert len(engines.device.graphs) <= 4 * len(engines.backend.engines)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_whose_capture_is_refused_or_fails_runs_as_it_is(
    tiny: Pair, prompt: Prompt, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    engines = Engines(tiny.graphs, tmp_path, rtx=False)
    engines.device.captures, engines.device.breaks_captures = fails, fails
    wanted = requests(tiny, prompt, [40], max_new_tokens=CANVAS, max_denoising_steps=5)
    same(Generator(engines.model).run(wanted), Generator(tiny.model).run(wanted))
    (head,) = [each for each in engines.backend.engines if each.name == "head"]
    own = head._contexts[0, 0]
    assert own is not None
    assert not own._fits
    assert ("runs without a CUDA graph: CUDA" in capsys.readouterr().err) == fails
    for size in (1, 1, 2, 2, 1, 1):  # alternating calls
        own.repeat(EngineCall({"a": size}, dict(own._shapes), dict(own._addresses), repeats=True))
    assert "CUDA graph" not in capsys.readouterr().err
    assert not engines.device.replayed


def test_passes_mark_nothing_for_a_profiler(tiny: Pair, prompt: Prompt, tmp_path: Path) -> None:
    engines = Engines(tiny.graphs, tmp_path, rtx=True)
    Generator(engines.model).run(requests(tiny, prompt, [9]))
    found = {each.nvtx_verbosity for n in range(3) for each in engines.contexts(n)}
    assert found == {ProfilingVerbosity.NONE}


def test_contexts_share_what_was_compiled(tiny: Pair, prompt: Prompt, tmp_path: Path) -> None:
    engines = Engines(tiny.graphs, tmp_path, rtx=True)
    Generator(engines.model).run(requests(tiny, prompt, [9]))
    contexts = [each for engine in engines.backend.engines for each in engine._engine.contexts]
    assert len(contexts) > len(engines.backend.engines)
    assert {id(each.config.runtime_cache) for each in contexts} == {
        id(engines.backend.compiled._cache)
    }


def test_a_context_is_told_only_what_changed(tiny: Pair, prompt: Prompt, tmp_path: Path) -> None:
    engines = Engines(tiny.graphs, tmp_path, rtx=True)
    wanted = requests(tiny, prompt, [40], early_stop=False, max_denoising_steps=4)
    Generator(engines.model).run(wanted)
    context = max(engines.contexts(2), key=lambda each: each.config.cuda_graph_strategy)
    tensors = len(engines.backend.engines[2].inputs) * 2 + len(engines.backend.engines[2].outputs)
    assert context.set_calls == tensors


def test_a_file_that_is_no_engine_is_said_with_tensorrt_s_own_words(
    tiny: Pair, tmp_path: Path
) -> None:
    engines = Engines(tiny.graphs, tmp_path, rtx=True)
    (tmp_path / "broken.engine").write_bytes(b"\0\1")
    with pytest.raises(CanvasError, match="cannot be loaded: the magic tag does not match"):
        engines.backend.open_engine("broken", tmp_path / "broken.engine", None)


def test_the_fake_has_no_name_or_parameter_that_tensorrt_rtx_has_not() -> None:
    """tests/build/test_tensorrt_api.py compares it with TensorRT."""
    real = pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    for fake in API:
        theirs = getattr(real, fake.__name__)
        for name in borrowed(fake):
            assert hasattr(theirs, name), f"{fake.__name__}.{name}"
            taken = parameters(fake, name)
            if taken is not None:
                doc = getattr(theirs, name).__doc__
                assert taken in documented(doc), f"{fake.__name__}.{name}: {doc}"


def test_every_type_of_tensorrt_that_a_tensor_can_have_is_known() -> None:
    real = pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    # Weights alone have fewer than eight bits, and scales E8M0.
    assert set(real.DataType.__members__) - set(tensorrt.NUMPY_DTYPES) == {"INT4", "FP4", "E8M0"}
    for name in tensorrt.NUMPY_DTYPES.values():
        assert host_dtype(name).itemsize in (1, 2, 4, 8)


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    pytest.importorskip("cuda.bindings.runtime", reason="needs canvasrt[rtx]")
    with pytest.raises(CanvasError, match="built for rtx-5090: no GPU can be used") as raised:
        TensorRTBackend(TARGET)
    assert "nvidia-smi" in raised.value.hint


@pytest.mark.skipif(not gpus(), reason="needs a GPU")
def test_on_a_gpu_the_demo_s_engines_answer(tmp_path: Path) -> None:
    """Build for this machine's GPU in bf16, and really run it once."""
    from canvasrt.build.options import BuildOptions
    from canvasrt.pipeline import build_bundle
    from canvasrt.targets import TARGETS

    target = next(t for t in TARGETS if t.capability == gpus()[0].capability)
    bundle = build_bundle("demo", target, tmp_path / "engines", BuildOptions("bf16"))
    model = open_model(bundle.path)
    params = SamplingParams.from_defaults(model.sampler, model.config, seed=1, max_new_tokens=64)
    wanted = Request(list(range(3, 40)), params)
    first, second = Generator(model).run([wanted, wanted])
    assert first.token_ids == second.token_ids
