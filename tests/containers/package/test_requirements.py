"""The requirements of a package: Python packages, and a base image that can load its engines."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from canvasrt.bundle import Bundle
from canvasrt.containers.package import releases
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.package import package
from canvasrt.containers.package.requirements import read_requirements, requirements
from canvasrt.errors import CanvasError
from tests.containers.package.conftest import Relabelled

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt-rtx", "tensorrt"])
def test_an_image_needs_only_what_serving_needs(backend: str):
    pins = requirements({backend: "1.7.1.116"}, "3.12")
    names = {pin.name for pin in pins}
    assert not names & {"torch", "transformers", "onnx", "onnxscript", "nvidia-modelopt", "pip"}
    assert ("onnxruntime" in names) == (backend == "onnxruntime")
    for name in ("cuda-bindings", "nvidia-ml-py"):
        assert (name in names) == (backend != "onnxruntime")
    assert ("tensorrt-rtx-cu13-libs" in names) == (backend == "tensorrt-rtx")
    assert [pin.version for pin in pins if pin.name.startswith("tensorrt")] == (
        {"onnxruntime": [], "tensorrt-rtx": ["1.7.1.116"] * 4, "tensorrt": ["1.7.1.116"]}[backend]
    )


def test_the_requirements_close_over_what_they_need():
    names = {pin.name.replace("-", "_") for pin in requirements({"onnxruntime": None}, "3.11")}
    for name in ("huggingface-hub", "fastapi", "rich", "onnxruntime"):
        for needed in map(Requirement, requires(name) or ()):
            if needed.marker is None:
                assert needed.name.lower().replace("-", "_") in names, needed


def test_engines_go_only_into_an_image_that_can_load_them(relabelled: Relabelled, tmp_path: Path):
    engines = relabelled("h100", "tensorrt", "11.1.0.106")
    options = PackageOptions()
    fitting = options.on("nvcr.io/nvidia/tritonserver:26.07-py3")
    made = package(engines, tmp_path / "fitting", options=fitting)
    assert 'TRT_VERSION%%+*}" != "11.1.0.106"' in (made.path / "Dockerfile").read_text()
    assert "tensorrt-cu13-bindings==11.1.0.106" in map(str, read_requirements(made.path))
    other = options.on("nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3")
    with pytest.raises(CanvasError, match=r"11\.1\.0\.106.* has 10\.14\.1\.48"):
        package(engines, tmp_path / "other", options=other)
    with pytest.raises(CanvasError, match="is not known") as refused:
        package(engines, tmp_path / "unknown", options=options.on("somewhere/triton:1"))
    assert "26.07-py3" in refused.value.hint
    assert not (tmp_path / "other").exists()


def test_an_image_tells_its_tensorrt_itself():
    assert releases.tensorrt_of({"TRT_VERSION": "11.3.0.99+cuda13.4"}) == "11.3.0.99"
    assert releases.tensorrt_of({}, ["nvcr.io/nvidia/tritonserver:24.09-py3"]) == "10.4.0.26"
    assert releases.tensorrt_of({}, ["tritonserver-of-mine:24.09-py3"]) is None
    assert releases.python_of({"NVIDIA_TRITON_SERVER_VERSION": "24.11"}) == "3.10"
    assert releases.python_of_name(releases.DEFAULT_BASE) == "3.12"


def test_a_package_of_several_targets(engines: Bundle, relabelled: Relabelled, tmp_path: Path):
    rtx = relabelled("rtx-5090", "tensorrt-rtx", "1.7.1.116", precision="nvfp4")
    made = package([engines.path, rtx], tmp_path / "package")
    assert made.manifest.options["targets"] == ["cpu", "rtx-5090"]
    for place in ("engines/cpu/manifest.json", "engines/rtx-5090/manifest.json", "chart/cpu"):
        assert (made.path / place).exists()
    dockerfile = (made.path / "Dockerfile").read_text()
    assert "engines/cpu/ package/engines/cpu/" in dockerfile
    assert 'canvasrt.precision="fp32,nvfp4"' in dockerfile
    assert "NVIDIA_VISIBLE_DEVICES" in dockerfile
    assert "capabilities: [gpu]" in (made.path / "compose.yaml").read_text()
    assert "tensorrt-rtx==1.7.1.116" in map(str, read_requirements(made.path))


def test_bundles_that_do_not_go_together_are_refused(
    engines: Bundle, relabelled: Relabelled, tmp_path: Path
):
    with pytest.raises(CanvasError, match="two bundles are for cpu"):
        package([engines.path, engines.path], tmp_path / "twice")
    spark = relabelled("dgx-spark", "tensorrt-rtx", "1.7.1.116")
    rtx = relabelled("rtx-4090", "tensorrt-rtx", "1.7.1.116")
    with pytest.raises(CanvasError, match="amd64 and arm64"):
        package([spark, rtx], tmp_path / "hosts")
    old = relabelled("rtx-5090", "tensorrt-rtx", "1.6.1.120")
    with pytest.raises(CanvasError, match=r"two versions of tensorrt-rtx"):
        package([old, rtx], tmp_path / "versions")


def test_wheels_of_an_unknown_tensorrt_are_refused(relabelled: Relabelled, tmp_path: Path):
    """The Dockerfile would have to download TensorRT's bindings, but `--wheels` promises a build without a package
    index."""
    options = PackageOptions(wheels=True).on("somewhere/triton:1")
    with pytest.raises(CanvasError, match="--wheels needs the TensorRT version") as refused:
        package(relabelled("", precision="bf16"), tmp_path / "package", options)
    assert releases.tensorrt_of_name(refused.value.hint.split()[-1])


def test_a_base_on_disk_with_the_default_s_name_is_not_exchanged(
    relabelled: Relabelled, tmp_path: Path
):
    """An image on disk keeps its name in `docker save`, so it may have the default's name and another content."""
    digest, version = "b" * 64, "11.4.0.106"
    options = PackageOptions(base=releases.DEFAULT_BASE, base_digest=digest, tensorrt=version)
    with pytest.raises(CanvasError, match=r"has 11\.4\.0\.106,.* cannot load them"):
        package(relabelled("h100", "tensorrt", "11.1.0.106"), tmp_path / "engines", options)
    made = package(relabelled("", precision="bf16"), tmp_path / "graphs", options)
    assert f"tensorrt-cu13-bindings=={version}" in map(str, read_requirements(made.path))
    assert digest in (made.path / "sbom.cdx.json").read_text()


def test_an_install_without_constraints_builds_engines_that_a_default_base_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = map(Requirement, project["optional-dependencies"]["tensorrt"])
    (allowed,) = [each.specifier for each in extra if each.name == "tensorrt"]
    published = ("11.0.0.114", "11.1.0.106", "11.2.1.2", "11.3.0.99", "11.4.0.106")
    chosen = list(allowed.filter(published))[-1]
    assert chosen in [each for tag, each in releases.TENSORRT.items() if tag.endswith("-py3")]


@pytest.mark.parametrize("tag", [tag for tag in releases.TENSORRT if tag.endswith("-py3")])
def test_engines_of_a_known_tensorrt_get_a_base_that_loads_them(tag: str) -> None:
    """For engines of a known TensorRT, a matching base is the default. For graphs and other engines, the newest image
    is."""
    built = {"name": "h100", "backend": "tensorrt", "builder_version": releases.TENSORRT[tag]}
    base = releases.base_for([built, None])
    releases.check_tensorrt(built, releases.tensorrt_of_name(base), base)
    rtx = {"name": "rtx", "backend": "tensorrt-rtx", "builder_version": "1"}
    for other in ([], [None], [rtx], [built | {"builder_version": "0"}]):
        assert releases.base_for(other) == releases.DEFAULT_BASE
