"""One ONNX graph to one engine with TensorRT-RTX or TensorRT, in a process of its own.

A build holds up to three times its weights in memory, cannot be interrupted from Python, and may be killed for want
of memory: a process gives all of the first back, can be ended at any time, and its death is an error like another.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from canvasrt.build.profiles import Profile, Range
from canvasrt.errors import CanvasError

_log = logging.getLogger(__name__)

# Looking for a GPU that is not there is logged as an error, and is none.
_NO_GPU = "catchCudaError"


@dataclass(frozen=True)
class Job:
    """What to build. `module` is `tensorrt_rtx` or `tensorrt`; `capability` None is the GPU that is here."""

    module: str
    graph: Path
    engine: Path
    capability: tuple[int, int] | None
    profile: Profile

    def to_json(self) -> str:
        """The text that the other process reads."""
        sizes = {name: each.to_json() for name, each in self.profile.items()}
        paths = {"graph": str(self.graph), "engine": str(self.engine)}
        return json.dumps(
            {"module": self.module, **paths, "capability": self.capability, "profile": sizes}
        )

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        data = json.loads(text)
        capability = data["capability"] and tuple(data["capability"])
        sizes = {name: Range(**each) for name, each in data["profile"].items()}
        return cls(data["module"], Path(data["graph"]), Path(data["engine"]), capability, sizes)


def compile_graph(job: Job) -> None:
    """Write the engine of a job. Raises CanvasError with TensorRT's own words when it refuses."""
    # -P and the path: the other process must import what this one does, from wherever it runs.
    code = f"from {__name__} import main; main()"
    command = [sys.executable, "-P", "-c", code, job.to_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the other one
    ) as process:
        try:
            assert process.stdout is not None
            errors = list(_errors(process.stdout))
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return
    name = job.graph.stem
    if process.returncode < 0:
        raise CanvasError(
            f"{name}: the {job.module} builder was killed by signal {-process.returncode}",
            "most likely memory ran out: close other programs, or use a machine with more",
        )
    said = errors[0] if errors else f"it ended with code {process.returncode} and said nothing"
    raise CanvasError(
        f"{name}: {job.module} built no engine: {said}", "--debug shows all that it said"
    )


def _errors(lines: Iterator[str]) -> Iterator[str]:
    """The errors among what the other process says; everything is logged."""
    for line in lines:
        _log.debug(line.rstrip())
        severity, _, text = line.rstrip().partition(": ")
        if severity in ("ERROR", "INTERNAL_ERROR") and _NO_GPU not in text:
            yield text


def build(job: Job) -> None:
    """Parse, configure, build and write, in this process. Raises CanvasError after TensorRT logged why."""
    trt = import_module(job.module)
    builder = trt.Builder(_logger(trt))
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    network.name = job.graph.stem  # its default is a running number, which would be in the engine
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(job.graph)):
        raise CanvasError("the graph cannot be parsed")
    config = builder.create_builder_config()
    if job.capability is not None:
        config.num_compute_capabilities = 1
        major, minor = job.capability
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{major}{minor}"), 0)
    config.add_optimization_profile(_optimization_profile(builder, network, job.profile))
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise CanvasError("no engine was built")
    job.engine.write_bytes(engine)


def _optimization_profile(builder: Any, network: Any, sizes: Mapping[str, Range]) -> Any:
    """TensorRT's profile: for each input, its shape with each dynamic dimension's sizes put in."""
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        value = network.get_input(number)
        shapes: dict[str, list[int]] = {"min": [], "opt": [], "max": []}
        for axis, size in enumerate(value.shape):
            name = value.get_dimension_name(axis)
            if size < 0 and name not in sizes:
                raise CanvasError(f"input {value.name} has an unknown dimension {name}")
            known = sizes[name] if size < 0 else Range(size, size, size)
            for kind, wanted in known.to_json().items():
                shapes[kind].append(wanted)
        profile.set_shape(value.name, **shapes)
    return profile


def _logger(trt: Any) -> Any:
    """A TensorRT logger that prints a line a message."""

    class Lines(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                print(f"{severity.name}: {' '.join(message.split())}", flush=True)

    return Lines()


def main() -> None:
    """Carry out the job that the only argument describes."""
    try:
        build(Job.from_json(sys.argv[1]))
    except (CanvasError, OSError) as error:
        print(f"ERROR: {error}", flush=True)
        sys.exit(1)
