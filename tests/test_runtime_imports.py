"""The runtime needs neither torch nor the exporter: an image that serves holds neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = ("torch", "canvasrt.export", "transformers", "onnx", "onnxscript", "onnx_ir")
# Graphs are lowered for a CPU where they are made, never where engines are served.
LOWERING = ("canvasrt.build.lower", "canvasrt.build.rounding")
_CODE = f"""
import importlib, sys, types

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {FORBIDDEN!r}):
            raise ImportError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, Refuse())
# Triton itself provides this one, to the models that it runs.
class Provided(types.ModuleType):
    def __getattr__(self, name):
        return type(name, (), {{}})

sys.modules["triton_python_backend_utils"] = Provided("triton_python_backend_utils")
importlib.import_module(sys.argv[1])
found = [name for name in sys.modules if name in {FORBIDDEN!r}]
assert not found, found
"""


def modules(stage: str) -> list[str]:
    return sorted(
        ".".join(("canvasrt", stage, *path.relative_to(ROOT / stage).with_suffix("").parts))
        for path in (ROOT / stage).rglob("*.py")
        if path.name != "__init__.py" and "templates" not in path.parts
    )


SERVING = [
    name
    for name in (*modules("runtime"), *modules("containers"), *modules("build"))
    if name not in LOWERING
]


@pytest.mark.parametrize("module", SERVING)
def test_imports_without_torch_and_the_exporter(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", _CODE, module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
