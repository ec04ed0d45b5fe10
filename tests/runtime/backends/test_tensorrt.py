"""The TensorRT backend on a fake TensorRT: what it refuses, and its contexts, profiles and CUDA graphs."""

from __future__ import annotations

import platform
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from canvasrt.errors import CanvasError
from canvasrt.machine import gpus
from canvasrt.runtime.backends import tensorrt
from canvasrt.runtime.backends.tensorrt import TensorRTBackend, check_target
from canvasrt.runtime.bundle_facts import host_dtype
from canvasrt.runtime.engine import EngineCall
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.fake_tensorrt import API, FakeCudaDevice, ProfilingVerbosity, fake_tensorrt
from tests.helpers.gpu_server import BATCH, VERSION, Server, _few_tokens, folder
from tests.helpers.gpu_server import RTX as TARGET
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, requests, same
from tests.helpers.tensorrt_api import borrowed, documented, parameters

__all__ = ["_few_tokens", "folder"]

HERE: dict[str, Any] = {
    "version": VERSION,
    "capability": (12, 0),
    "machine": platform.machine(),
}
SEVERAL = TARGET | {"name": "rtx", "compute_capability": "8.6, 8.9, 12.0"}
OTHER_HOST = TARGET | {"backend": "tensorrt", "built_on": "aarch64", "name": "h100"}


@pytest.mark.parametrize(
    ("target", "here", "words"),
    [
        (TARGET, {}, None),
        (
            TARGET,
            {"version": "1.8.0"},
            r"built by tensorrt-rtx 1\.7\.1\.116, but 1\.8\.0 is installed",
        ),
        (
            TARGET,
            {"capability": (8, 9)},
            r"rtx-5090, compute capability 12\.0, but the GPU here has 8\.9",
        ),
        *((SEVERAL, {"capability": each}, None) for each in ((8, 6), (8, 9), (12, 0))),
        *(
            (SEVERAL, {"capability": each}, r"for rtx, compute capability 8\.6, 8\.9, 12\.0")
            for each in ((6, 8), (9, 1), (2, 0), (12, 1))
        ),
        (OTHER_HOST, {"machine": "x86_64"}, "built on aarch64, and this machine is x86_64"),
        (OTHER_HOST | {"backend": "tensorrt-rtx"}, {"machine": "x86_64"}, None),
    ],
)
def test_only_engines_for_this_machine_are_taken(
    target: dict[str, Any], here: dict[str, Any], words: str | None
) -> None:
    with pytest.raises(CanvasError, match=words) if words else nullcontext():
        check_target(target, **(HERE | here))


def test_requests_share_no_pass_unless_they_are_let() -> None:
    """On a GPU, sharing a batch may change last bits, but tokens must depend on the seed alone."""
    device = FakeCudaDevice()
    module = fake_tensorrt(VERSION, True, device)
    assert TensorRTBackend(TARGET, module=module, device=device).rows_apart  # type: ignore[arg-type]


def test_a_place_keeps_one_graph(
    folder: Path, tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place keeps only the graph of its latest call. It drops the older graph once no queued work uses it."""
    server = Server(folder, rtx=False)
    forget, queued = server.device.forget, []

    def forgets(graph: int) -> None:
        queued.append(len(server.device._queue))
        forget(graph)

    monkeypatch.setattr(server.device, "forget", forgets)
    wanted = requests(tiny, prompt, [40, 300], early_stop=False, max_new_tokens=CANVAS)
    for order in (wanted, wanted[::-1]):
        same(Generator(server.model).run(order), Generator(tiny.model).run(order))
    assert queued
    assert not any(queued)
    assert len(server.device.graphs) <= BATCH * len(server.backend.engines)


def own_contexts(server: Server) -> list[Any]:
    """Return the contexts of places in the head's batch."""
    (head,) = [each for each in server.backend.engines if each.name == "head"]
    return [each for (_, place), each in head._contexts.items() if place is not None]


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_whose_capture_is_refused_or_fails_runs_as_it_is(
    folder: Path, tiny: Pair, prompt: Prompt, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    server = Server(folder, rtx=False)
    server.device.captures, server.device.breaks_captures = fails, fails
    wanted = requests(tiny, prompt, [40], max_new_tokens=CANVAS, max_denoising_steps=5)
    same(Generator(server.model).run(wanted), Generator(tiny.model).run(wanted))
    (own,) = own_contexts(server)
    assert not own._fits
    why = "CUDA" if fails else "TensorRT says it cannot be captured"
    assert f"runs without a CUDA graph: {why}" in capsys.readouterr().err
    for size in (1, 1, 2, 2, 1, 1):  # repeated and alternating calls
        own.repeat(EngineCall({"a": size}, dict(own._shapes), dict(own._addresses), repeats=True))
    assert "CUDA graph" not in capsys.readouterr().err
    assert not server.device.replayed


def test_contexts_share_what_was_compiled_and_are_told_only_what_changed(
    folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    """They also write no markers for profilers."""
    server = Server(folder)
    Generator(server.model).run(requests(tiny, prompt, [40], early_stop=False))
    contexts = [each for engine in server.backend.engines for each in engine._engine.contexts]
    assert {each.nvtx_verbosity for each in contexts} == {ProfilingVerbosity.NONE}
    caches = {id(each.config.runtime_cache) for each in contexts}
    assert caches == {id(server.backend.compiled._cache)}
    assert {int(each.config.cuda_graph_strategy) for each in contexts} == {0, 1}
    (own,) = own_contexts(server)
    head = own._engine
    assert own._context.set_calls == 2 * len(head.inputs) + len(head.outputs)


def test_a_file_that_is_no_engine_is_said_with_tensorrt_s_own_words(
    folder: Path, tmp_path: Path
) -> None:
    server = Server(folder)
    (tmp_path / "broken.engine").write_bytes(b"\0\1")
    with pytest.raises(CanvasError, match="cannot be loaded: the magic tag does not match"):
        server.backend.open_engine("broken", tmp_path / "broken.engine", None)


def test_the_fake_has_no_name_or_parameter_that_tensorrt_rtx_has_not() -> None:
    """tests/build/test_tensorrt_api.py compares the fake with TensorRT."""
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
    # Inputs and outputs never have these types: only weights have fewer than eight bits, and only scales are E8M0.
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
    """Builds bf16 engines for this machine's GPU, and generates once."""
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
