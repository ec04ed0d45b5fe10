"""Tests whether TensorRT-RTX, TensorRT, our kernels and ONNX Runtime's CUDA provider run on this machine's GPU.

It generates with the whole demo model, builds one segment for several compute capabilities, tries to load and run each, and
prints the tool's own messages. Each try is a process of its own, since a crash is an answer too.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import results
from canvasrt.bundle import load_bundle
from canvasrt.defaults import SLOTTED, SORTED
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import is_installed
from canvasrt.machine import gpus

# How the compute capability is set before a build. `gpu` is that of this machine's GPU.
CAPABILITIES = ("CURRENT", "none", "SM120", "gpu")
MODULES = {"tensorrt_rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}
TIMEOUT = 600
RAN = "it ran"  # in the message of a try that ran on a GPU to the end


def measure(
    modules: Annotated[
        str, typer.Option(help="What to try: modules, and generations of the whole demo.")
    ] = "",
    capabilities: str = ",".join(CAPABILITIES),
    child: Annotated[tuple[str, str, str, str] | None, typer.Option("--try", hidden=True)] = None,
    out: results.Out = None,
) -> None:
    """Try every module and capability; record the messages of each step. The exit code is 1 if nothing ran."""
    if child:
        name, capability, graphs, engine = child
        if name in WHOLE:
            said = {"generate": _said(lambda: WHOLE[name](Path(graphs).parent))}
        else:
            said = attempt(name, capability, Path(graphs), Path(engine))
        print(json.dumps(said))
        return
    names = modules.split(",") if modules else [*WHOLE, *MODULES]
    if unknown := set(names) - {*WHOLE, *MODULES}:
        known = ", ".join([*WHOLE, *MODULES])
        raise UsageError(
            f"--modules names {min(unknown)}, which is unknown", f"give some of {known}"
        )
    figures: dict[str, list[dict[str, str]]] = {"outcomes": []}
    with tempfile.TemporaryDirectory(prefix="canvasrt-probe-") as folder:
        for name, said in probe(Path(folder), names, capabilities.split(",")):
            figures["outcomes"].append({"tried": name} | said)
            results.write(figures, out)
    results.report(figures, out)
    if not any(RAN in text for each in figures["outcomes"] for text in each.values()):
        raise typer.Exit(1)


def probe(
    folder: Path, names: list[str], capabilities: list[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what was tried, and the message of each step."""
    from canvasrt.export.graphs import export_graphs

    for name in names:
        # TensorRT builds for this machine's GPU only.
        for capability in capabilities if name == "tensorrt_rtx" else ("none",):
            tried = name if name in WHOLE else f"{name}, {capability}"
            if name in MODULES and not is_installed(name):
                yield tried, {"build": f"skipped: {name} is not installed"}
                continue
            print(f"trying {tried}", file=sys.stderr, flush=True)
            if name in MODULES and not (folder / "graphs").exists():
                export_graphs("demo", folder / "graphs", precision="bf16")
            yield tried, _in_a_process(name, capability, folder)


def _in_a_process(module: str, capability: str, folder: Path) -> dict[str, str]:
    engine = folder / f"{module}-{capability}.engine"
    here = Path(__file__).parents[1]
    tried = [module, capability, str(folder / "graphs"), str(engine)]
    command = [sys.executable, "-m", "bench", "probe", "--try", *tried]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"process": f"did not end within {TIMEOUT} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        return dict(json.loads(lines[-1]))
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return {"process": f"ended with code {done.returncode}: {' '.join(last)}"}


def attempt(module: str, capability: str, graphs: Path, engine: Path) -> dict[str, str]:
    """Build, load and run the head of `graphs`. Return each step's message, up to the first failure."""
    outcome = {"build": _said(lambda: _build(module, capability, graphs, engine))}
    if engine.exists():
        outcome["load and run"] = _said(lambda: _run(module, graphs, engine))
    return outcome


def _said(work: Any) -> str:
    try:
        return str(work())
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"failed: {type(error).__name__}: {lines[0] if lines else ''}"


def _build(module: str, capability: str, graphs: Path, engine: Path) -> str:
    import importlib

    trt = importlib.import_module(module)
    said: list[str] = []

    class Errors(trt.ILogger):  # type: ignore[name-defined, misc]
        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                said.append(" ".join(message.split()))

    builder = trt.Builder(Errors())
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder.logger)
    length = load_bundle(graphs, check=False).manifest.model.canvas_length
    if not parser.parse_from_file(str(graphs / "head.onnx")):
        raise CanvasError(f"the graph cannot be parsed: {said}", "")
    config = builder.create_builder_config()
    if capability != "none":
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, _named(capability)), 0)
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        value = network.get_input(number)
        names = [value.get_dimension_name(axis) for axis in range(len(value.shape))]
        fixed = [
            {"batch": 1, "length": length}[name] if size < 0 else size
            for name, size in zip(names, value.shape, strict=True)
        ]
        profile.set_shape(value.name, fixed, fixed, fixed)
    config.add_optimization_profile(profile)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise CanvasError("; ".join(said) or "no engine, and no reason given", "")
    engine.write_bytes(built)
    return f"{len(bytes(built))} bytes"


def _named(capability: str) -> str:
    if capability != "gpu":
        return capability
    if not gpus():
        raise CanvasError("this machine has no GPU", "")
    major, minor = gpus()[0].capability
    return f"SM{major}{minor}"


def _run(module: str, graphs: Path, engine: Path) -> str:
    """Load the head and run it once, through the runtime's own backend."""
    import importlib

    import numpy as np

    from canvasrt.runtime.backends.cuda import CudaDevice
    from canvasrt.runtime.backends.tensorrt import TensorRTBackend
    from canvasrt.runtime.engine import EngineCall
    from canvasrt.runtime.gpu.workspace import Transfer, constant

    config = load_bundle(graphs, check=False).manifest.model
    device = CudaDevice("rtx")
    here = {
        "name": "this GPU",
        "backend": MODULES[module],
        "builder_version": importlib.import_module(module).__version__,
        "compute_capability": ".".join(map(str, device.capability)),
        "built_on": platform.machine(),
    }
    backend = TensorRTBackend(here, device=device)
    opened = backend.open_engine("head", engine, None)
    opened.prepare()
    length, size = config.canvas_length, config.hidden_size
    random = np.random.default_rng(0)
    hidden = random.standard_normal((1, length, size)).astype(opened.inputs["hidden"])
    given = {
        "hidden": hidden,
        "temperature": np.ones(1, np.float32),
        "entropy_bound": np.ones(1, np.float32),
        "uniforms": random.random((1, length), np.float32),
        "noise": np.zeros((1, length), np.int64),
    }
    results = Transfer(
        device,
        {
            "canvas": (np.int64, length),
            "argmax": (np.int64, length),
            "entropy": (np.float32, length),
            "accepted": (np.bool_, length),
        },
    )
    shapes = {name: array.shape for name, array in given.items()}
    addresses = {name: constant(device, array) for name, array in given.items()}
    for name in ("canvas", "argmax", "entropy", "accepted"):
        shapes[name], addresses[name] = (1, length), results.address(name)
    shapes["next_hidden"], addresses["next_hidden"] = hidden.shape, device.allocate(hidden.nbytes)
    opened.launch(EngineCall({"batch": 1, "length": length}, shapes, addresses, False))
    results.download()
    device.synchronize()
    argmax = results.view("argmax", length)
    entropy = results.view("entropy", length)
    good = bool((argmax >= 0).all() and (argmax < config.vocab_size).all())
    good = good and bool(np.isfinite(entropy).all() and (entropy >= -1e-3).all())
    return f"{RAN} on {device.name}, {'plausible' if good else 'WRONG'} numbers"


def _provider(folder: Path) -> str:
    """Return the demo's tokens through the CUDA provider, next to the CPU's."""
    from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaBackend

    OrtCudaBackend()  # fails at once if something is missing, and names it
    return _generated(_in_fp32(folder), folder, "cuda")


def _engines(folder: Path, experts: str = SLOTTED) -> str:
    """Return the demo's tokens through engines for this machine's GPU, next to the CPU's in fp32."""
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
    """Time a pass at a new shape, at the same shape again, and when its context returns to that shape from another."""
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
    """Generate four requests apart, in shared passes, and on the CPU; return whether tokens agree.

    In shared passes, a request must get the same tokens alone and with others.
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


# Generations of the whole demo, by what runs it.
WHOLE: dict[str, Callable[[Path], str]] = {
    "engines": _engines,
    SORTED: partial(_engines, experts=SORTED),  # our own kernels
    "provider": _provider,  # ONNX Runtime's
}
