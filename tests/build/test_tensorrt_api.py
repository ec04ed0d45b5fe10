"""The TensorRT calls of the builder and of the runtime exist in the API of the real `tensorrt` bindings.

A real build with `tensorrt_rtx` records every name that it uses. The bindings of TensorRT are a wheel on PyPI, which
can be imported if stubs replace TensorRT's libraries.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from canvasrt.build import compile
from canvasrt.pass_shapes import Range
from tests.helpers.fake_tensorrt import API, RTX, IRuntimeCache, IRuntimeConfig
from tests.helpers.tensorrt_api import borrowed, documented, parameters

rtx = pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")

# The TensorRT version in the newest known Triton image, and later versions.
VERSIONS = ("11.1.0.106", "11.3.0.99", "11.4.0.106")
# Wheels are downloaded once per machine.
DOWNLOADS = Path(tempfile.gettempdir()) / "canvasrt-test-wheels"

# TensorRT's classes that the builder subclasses. Calls of these subclasses are not recorded.
SUBCLASSED = (rtx.ILogger, rtx.IStreamWriter)
UNSEEN = {
    ("ILogger", "WARNING", "get"),
    ("ILogger", "log", "call"),
    ("IStreamWriter", "write", "call"),
}

# Names that only TensorRT-RTX has. The builder checks whether they exist.
OPTIONAL = {("BuilderFlag", "REQUIRE_USER_ALLOCATION", "get")}

# Methods that the runtime calls only if TensorRT has them.
OF_RTX = {"create_runtime_config", "is_stream_capturable"}

# A class (or "" for the module), an attribute's name, and how it was used: get, set or call.
Use = tuple[str, str, str]


@dataclass(frozen=True)
class Bindings:
    """TensorRT's bindings of one version. `folder` contains the module `tensorrt_bindings`."""

    folder: Path
    version: str

    def ask(self, uses: Sequence[Use]) -> dict[str, dict[str, Any]]:
        """Return facts about each use: whether the name exists, whether it can be set, and its docstring."""
        answer = subprocess.run(
            [sys.executable, "-c", CHECK],
            input=json.dumps(uses),
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(self.folder)},
            check=True,
        )
        found = json.loads(answer.stdout)
        assert found["version"] == self.version
        return found["answers"]


class Recorder:
    """Wraps an object of `tensorrt_rtx`, acts like it, and records its use."""

    def __init__(self, real: Any, uses: set[Use]) -> None:
        object.__setattr__(self, "_real", real)
        object.__setattr__(self, "_uses", uses)

    def _note(self, name: str, what: str) -> None:
        self._uses.add((_class_name(self._real), name, what))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if callable(value) and not isinstance(value, type):
            self._note(name, "call")
            return lambda *given, **named: self._call(value, given, named)
        self._note(name, "get")
        # A class to be subclassed must be the real one.
        return value if any(value is each for each in SUBCLASSED) else self._wrapped(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "__class__":  # setting Python's own attribute makes a layer specific
            self._note(name, "set")
        setattr(self._real, name, _real(value))

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._note("__init__", "call")
        return self._call(self._real, given, named)

    def _call(self, function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        answer = function(*map(_real, given), **{key: _real(each) for key, each in named.items()})
        return self._wrapped(answer)

    def _wrapped(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if not kind.__module__.startswith("tensorrt_rtx"):
            return value
        # Shapes, buffers and enumeration values are plain values.
        plain = isinstance(value, (rtx.Dims, rtx.IHostMemory)) or hasattr(type(value), "__int__")
        return value if plain else Recorder(value, self._uses)


def _real(value: Any) -> Any:
    return value._real if isinstance(value, Recorder) else value


def _class_name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return ""
    return (value if isinstance(value, type) else type(value)).__name__


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> list[Use]:
    """Return how a build uses the module. The build names no GPU, like builds with TensorRT."""
    folder = tmp_path_factory.mktemp("recorded")
    shape = ["batch", 2, 64, 64]
    names = ("query", "key", "value")
    graph = helper.make_graph(
        [helper.make_node("Attention", list(names), ["y"])],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, shape)],
    )
    file = folder / "graph.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), file)
    found: set[Use] = set()
    sizes = {"all": {"batch": Range(1, 2, 4)}}
    job = compile.Job("recorded", file, folder / "e", (), sizes, folder / "timing" / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "recorded", Recorder(rtx, found))
        compile.compile_engine(job)
        compile.compile_engine(job)  # with the kernel timings of the first build
    assert (folder / "e").stat().st_size
    assert job.timing is not None
    assert job.timing.is_file()
    assert found >= OPTIONAL
    return sorted((found | UNSEEN) - OPTIONAL)


@pytest.fixture(scope="module", params=VERSIONS)
def bindings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bindings:
    """Bindings with stubs, which can be imported without TensorRT's libraries."""
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}, to make stubs of TensorRT's libraries")
    folder = tmp_path_factory.mktemp("bindings")
    with zipfile.ZipFile(_download(request.param)) as wheel:
        wheel.extractall(folder)
    library = folder / "tensorrt_bindings" / "tensorrt.so"
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    names = [line.split()[-1] for line in listed.stdout.splitlines() if " U " in line]
    here = ctypes.CDLL(None)
    missing = [
        name
        for name in names
        if "@" not in name and not name.startswith(("Py", "_Py")) and not hasattr(here, name)
    ]
    assert "createInferBuilder_INTERNAL" in missing
    source = folder / "stubs.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in missing))
    for name in ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11"):
        # Stubs are next to the bindings, where the bindings' rpath points.
        out = library.parent / name
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", out, source]
        subprocess.run(command, check=True)
    return Bindings(folder, request.param)


def _download(version: str) -> Path:
    """Download the wheel. Skip the test if no package index can be reached."""
    wheel = f"tensorrt-cu13-bindings=={version}"
    name = wheel.replace("-", "_").replace("==", "-")
    command = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", wheel]
    if not list(DOWNLOADS.glob(f"{name}-cp3{sys.version_info.minor}*.whl")):
        try:
            subprocess.run(
                [sys.executable, *command, "-d", DOWNLOADS],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            pytest.skip(f"{wheel} cannot be downloaded: {said[-1] if said else error}")
    return next(DOWNLOADS.glob(f"{name}-cp3{sys.version_info.minor}*.whl"))


CHECK = """
import json, sys
import tensorrt_bindings as api
answers = {}
for owner, name, what in json.load(sys.stdin):
    holder = getattr(api, owner, None) if owner else api
    value = getattr(holder, name, None)
    facts = {"there": value is not None, "doc": str(getattr(value, "__doc__", "") or "")}
    facts["set"] = getattr(value, "fset", None) is not None
    answers[f"{owner}.{name} {what}"] = facts
print(json.dumps({"version": api.__version__, "answers": answers}))
"""


def test_a_build_takes_what_is_known_of_it(uses: list[Use]) -> None:
    """The recorder sees known uses. Otherwise, the next test would prove nothing."""
    assert {
        ("", "Builder", "get"),
        ("Builder", "__init__", "call"),
        ("Builder", "build_serialized_network_to_stream", "call"),
        ("NetworkDefinitionCreationFlag", "STRONGLY_TYPED", "get"),
        ("INetworkDefinition", "name", "set"),
        ("IBuilderConfig", "max_aux_streams", "set"),
        ("IBuilderConfig", "set_timing_cache", "call"),
        ("IBuilderConfig", "get_timing_cache", "call"),
        ("IBuilderConfig", "add_optimization_profile", "call"),
        ("OnnxParser", "parse_from_file", "call"),
        ("IOptimizationProfile", "set_shape", "call"),
        ("ITensor", "get_dimension_name", "call"),
        ("IAttention", "decomposable", "set"),
    } <= set(uses)


def test_tensorrt_has_what_the_builder_takes(uses: list[Use], bindings: Bindings) -> None:
    answers = bindings.ask(uses)
    for owner, name, what in uses:
        facts = answers[f"{owner}.{name} {what}"]
        assert facts["there"], f"tensorrt has no {owner}.{name}"
        if what == "set":
            assert facts["set"], f"tensorrt's {owner}.{name} cannot be set"
        if what == "call":
            ours = getattr(getattr(rtx, owner), name).__doc__ or ""
            # TensorRT may have further overloads.
            assert _signatures(ours) <= _signatures(facts["doc"]), f"{owner}.{name}"
            assert _signatures(ours), f"{owner}.{name}: no signature to compare"


def test_tensorrt_has_what_the_runtime_takes(bindings: Bindings) -> None:
    """The runtime's tests use a fake. All names and parameters of the fake exist in TensorRT."""
    of_rtx = {*RTX, IRuntimeCache, IRuntimeConfig}
    taken = {
        (fake.__name__, name, "call"): parameters(fake, name)
        for fake in API
        if fake not in of_rtx
        for name in borrowed(fake) - OF_RTX
    }
    answers = bindings.ask(list(taken))
    for (owner, name, what), wanted in taken.items():
        facts = answers[f"{owner}.{name} {what}"]
        assert facts["there"], f"tensorrt has no {owner}.{name}"
        if wanted is not None:
            assert wanted in documented(facts["doc"]), f"{owner}.{name}: {facts['doc']}"


def _signatures(doc: str) -> set[str]:
    """Return the signatures in a docstring, with the module's name normalized and without overload numbers."""
    text = doc.replace("tensorrt_rtx", "tensorrt").replace("tensorrt_bindings.tensorrt", "trt")
    return {re.sub(r"^\d+\. ", "", line.strip()) for line in text.splitlines() if "(self:" in line}
