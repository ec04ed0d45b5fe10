"""Builds one ONNX graph into one engine with TensorRT-RTX or TensorRT, in a child process.

A build takes more than twice its weights' memory, and cannot be interrupted from Python. If memory runs out, the kernel
kills the builder. A child process can be killed at any time, and then returns all of its memory. If it dies, the parent
raises an ordinary error.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from canvasrt.build.profile_ranges import Profile
from canvasrt.children import signal_at_death_of
from canvasrt.errors import CanvasError
from canvasrt.machine import VISIBLE
from canvasrt.pass_shapes import Range
from canvasrt.roofline import store
from canvasrt.roofline.parse import is_kernel_list, parse
from canvasrt.roofline.resolve import resolve_sizes
from canvasrt.roofline.tensor_shapes import shapes_of

_log = logging.getLogger(__name__)

# TensorRT-RTX logs a missing GPU as an error, although it builds without one.
_NO_GPU = "catchCudaError"
# The builder's log line that states an engine's activation memory.
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True)
class Job:
    """A job for the builder. `module` is `tensorrt_rtx` or `tensorrt`. The engine is built for GPUs of all
    `capabilities`. If there are none, it is built for this machine's GPU, whose UUID is `gpu`. `timing` is the timing
    cache's file, which is created if missing.
    """

    module: str
    graph: Path
    engine: Path
    capabilities: tuple[tuple[int, int], ...]
    profiles: Mapping[str, Profile]
    timing: Path | None = None
    gpu: str = ""

    @property
    def kernels(self) -> Path:
        """The file of the kernel list, next to the engine."""
        return self.engine.with_name(self.engine.stem + store.KERNELS_SUFFIX)

    def to_json(self) -> str:
        """Return the text that the child process reads."""
        profiles = {
            name: {dimension: size.to_json() for dimension, size in sizes.items()}
            for name, sizes in self.profiles.items()
        }
        paths = {"graph": str(self.graph.absolute()), "engine": str(self.engine.absolute())}
        timing = str(self.timing.absolute()) if self.timing else None
        said = {"module": self.module, "capabilities": self.capabilities, "profiles": profiles}
        return json.dumps({**said, **paths, "timing": timing})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read a job from the text that `to_json` returned."""
        data = json.loads(text)
        gpus = tuple((major, minor) for major, minor in data["capabilities"])
        profiles = {
            name: {dimension: Range(**size) for dimension, size in sizes.items()}
            for name, sizes in data["profiles"].items()
        }
        graph, engine = Path(data["graph"]), Path(data["engine"])
        timing = data["timing"] and Path(data["timing"])
        return cls(data["module"], graph, engine, gpus, profiles, timing)


class Children:
    """The running builder processes. `kill` ends them and prevents new ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def kill(self) -> None:
        """Kill all processes immediately."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()

    def start(self, command: list[str], gpu: str = "") -> subprocess.Popen[str]:
        """Start a process. Its stdout and stderr are one text stream. Raises CanvasError after `kill`.

        gpu: the UUID of the only GPU that the process may use.
        """
        with self._lock:
            if self._stopped:
                raise CanvasError("the build was stopped", "start it again")
            # The child must import the same modules as this process, from any working directory.
            path = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, **({VISIBLE: gpu} if gpu else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that Ctrl-C only reaches this process, which then kills its children
            )
            self._running.add(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill a process if it is still running, and reap it."""
        process.kill()
        process.wait()
        with self._lock:
            self._running.discard(process)


def compile_graph(job: Job, children: Children | None = None) -> int | None:
    """Build the engine of a job in a child process. Return how many bytes of device memory its activations take; None
    if the builder did not report this. Raises CanvasError with TensorRT's message if the build fails."""
    children = children or Children()
    code = f"from {__name__} import main; main()"
    command = [sys.executable, "-P", "-c", code, job.to_json(), str(os.getpid())]
    process = children.start(command, job.gpu)
    try:
        assert process.stdout is not None
        errors, activations = _read(process.stdout)
        process.wait()
    finally:
        children.end(process)
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode == 0:
        return activations
    name = job.graph.stem
    if process.returncode < 0:
        raise CanvasError(
            f"{name}: the {job.module} builder was killed by signal {-process.returncode}",
            "most likely memory ran out: close other programs, or use a machine with more memory",
        )
    said = errors[0] if errors else f"it ended with code {process.returncode} without a message"
    raise CanvasError(
        f"{name}: {job.module} failed to build an engine: {said}",
        "--debug shows the builder's full log",
    )


def _read(lines: Iterable[str]) -> tuple[list[str], int | None]:
    """Log every line of the child's output. Return the error messages, and how many bytes activations take."""
    errors: list[str] = []
    activations = None
    for line in lines:
        _log.debug(line.rstrip())
        severity, _, text = line.rstrip().partition(": ")
        if severity in ("ERROR", "INTERNAL_ERROR") and _NO_GPU not in text:
            errors.append(text)
        if found := _ACTIVATIONS.search(text):
            activations = max(activations or 0, int(found[1]))
    return errors, activations


def compile_engine(job: Job) -> None:
    """Build and write a job's engine in this process. If that fails, TensorRT logs why before CanvasError is raised."""
    trt = import_module(job.module)
    logger = _logger(trt)
    builder = trt.Builder(logger)
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    # A fixed name, because the default is a running number that becomes part of the engine.
    network.name = job.graph.stem
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(job.graph)):
        raise CanvasError("the graph cannot be parsed", "see the builder's messages above")
    _let_attention_be_decomposed(trt, network)
    config = _config(trt, builder, network, job)
    # Stream to the file: holding the whole engine in memory next to its weights would take a third more memory.
    with job.engine.open("wb") as file:
        writer = _writer(trt, file)
        made = builder.build_serialized_network_to_stream(network, config, writer)
        if writer.error:
            raise writer.error
        if not made:
            raise CanvasError("no engine was built", "see the builder's messages above")
    _keep_timings(config, job.timing)
    _write_kernels(trt, network, job, logger.kernel_list)


def _use_timings(config: Any, file: Path) -> None:
    """Reuse kernel timings from earlier builds, and record new ones. If TensorRT refuses the file, because it is
    damaged or from another kind of GPU, record all timings anew."""
    for content in (file.read_bytes() if file.is_file() else b"", b""):
        timings = config.create_timing_cache(content)
        if timings is not None and config.set_timing_cache(timings, ignore_mismatch=False):
            return


def _keep_timings(config: Any, file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_name(f"{file.name}.{os.getpid()}")
        whole.write_bytes(bytes(config.get_timing_cache().serialize()))
        whole.replace(file)


def _write_kernels(trt: Any, network: Any, job: Job, listed: str) -> None:
    """Write the kernel list from the builder's message `listed`. The network cannot be built afterwards.

    A failure is only logged, because the engine works without the list. (The list's form can change between versions of
    TensorRT.)"""
    if not listed:
        print("WARNING: the builder did not list its kernels", flush=True)
        return
    fixed = [
        {each: size.max for each, size in sizes.items() if size.min == size.max}
        for sizes in job.profiles.values()
    ]
    try:
        shapes = shapes_of(trt, network, fixed)
        programs = zip(parse(listed), shapes, fixed, strict=True)
        resolved = [resolve_sizes(*each) for each in programs]
        store.write_kernels(dict(zip(job.profiles, resolved, strict=True)), job.kernels)
    except Exception as error:
        job.kernels.unlink(missing_ok=True)
        print(f"WARNING: the kernels cannot be listed: {error!r}", flush=True)


def _writer(trt: Any, file: BinaryIO) -> Any:
    """Return a TensorRT stream writer over an open file. Its `error` says why a write failed, since the bindings ignore
    exceptions."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:
                self.error = error
                return 0

    return Writer()


def _config(trt: Any, builder: Any, network: Any, job: Job) -> Any:
    """Return the builder's configuration, which sets the GPU, the profiles, and a single stream."""
    config = builder.create_builder_config()
    # On auxiliary streams, parts of attention could run concurrently and need memory at the same time.
    config.max_aux_streams = 0
    # This makes the builder list its kernels; it changes neither the engine's size nor the build time.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.timing is not None:
        _use_timings(config, job.timing)
    # Only TensorRT-RTX has this flag. Without it, a call could allocate memory, which a CUDA graph cannot capture.
    if own := getattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION", None):
        config.set_flag(own)
    if job.capabilities:
        config.num_compute_capabilities = len(job.capabilities)
    for place, (major, minor) in enumerate(job.capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{major}{minor}"), place)
    for sizes in job.profiles.values():
        config.add_optimization_profile(_optimization_profile(builder, network, sizes))
    return config


def _let_attention_be_decomposed(trt: Any, network: Any) -> None:
    """Allow TensorRT to decompose attention if no fused kernel supports the profile's sizes."""
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings return the base class ILayer
            layer.attention.decomposable = True


def _optimization_profile(builder: Any, network: Any, sizes: Profile) -> Any:
    """Return TensorRT's profile: for every input, its smallest, typical and largest shape."""
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        value = network.get_input(number)
        shapes: dict[str, list[int]] = {"min": [], "opt": [], "max": []}
        for axis, size in enumerate(value.shape):
            name = value.get_dimension_name(axis)
            if size < 0 and name not in sizes:
                raise CanvasError(
                    f"input {value.name} has an unknown dimension {name}",
                    "export the graphs again with this version",
                )
            known = sizes[name] if size < 0 else Range(size, size, size)
            for kind, wanted in known.to_json().items():
                shapes[kind].append(wanted)
        profile.set_shape(value.name, **shapes)
    return profile


def _logger(trt: Any) -> Any:
    """Return a TensorRT logger that prints one line per message, and keeps the builder's kernel list."""

    class Lines(trt.ILogger):  # type: ignore[misc]
        kernel_list = ""

        def log(self, severity: Any, message: str) -> None:
            if is_kernel_list(message):
                self.kernel_list = message
            if severity <= trt.ILogger.WARNING or _ACTIVATIONS.search(message):
                print(f"{severity.name}: {' '.join(message.split())}", flush=True)

    return Lines()


def main() -> None:
    """Run the job in the first argument. The second argument is the parent's process id."""
    try:
        if not signal_at_death_of(int(sys.argv[2]), signal.SIGKILL):
            raise CanvasError("the build has ended", "start it again")
        compile_engine(Job.from_json(sys.argv[1]))
    except (CanvasError, OSError) as error:
        print(f"ERROR: {error}", flush=True)
        sys.exit(1)
