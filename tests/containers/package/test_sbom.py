"""The software bill of materials: its content and form, and the detection of edits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.package.requirements import Installed
from canvasrt.errors import CanvasError


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
    (wheel,) = (packaged.path / "wheels").glob("canvasrt-*.whl")
    (own,) = bom["metadata"]["component"]["hashes"]
    assert own["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_bill_of_materials_is_valid_cyclonedx(packaged: Bundle):
    pytest.importorskip("jsonschema")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (packaged.path / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_an_edited_bill_of_materials_is_found(packaged: Bundle):
    from canvasrt.containers.image.verify import check_sbom

    bom = json.loads((packaged.path / "sbom.cdx.json").read_text())
    files = json.loads((packaged.path / "image" / "manifest.json").read_text())["files"]
    assert check_sbom(json.dumps(bom).encode(), files, "here") == len(bom["components"])
    bom["components"] = [each for each in bom["components"] if "body_0.bin" not in each["name"]]
    with pytest.raises(CanvasError, match=r"body_0\.bin"):
        check_sbom(json.dumps(bom).encode(), files, "here")


def test_the_packages_of_the_base_are_listed(engines: Bundle, tmp_path: Path) -> None:
    from canvasrt.containers.package.sbom import write_sbom

    inside = [
        Installed("deb/ubuntu", "libssl3", "3.0.2-1", "amd64"),
        Installed("pypi", "numpy", "1.26.4"),
    ]
    write_sbom(tmp_path / "bom.json", [engines.manifest], [], {}, "triton@sha256:12", inside)
    bom = json.loads((tmp_path / "bom.json").read_text())
    (base,) = [each for each in bom["components"] if each["type"] == "container"]
    assert (base["name"], base["version"]) == ("triton", "sha256:12")
    assert {each["purl"] for each in base["components"]} == {
        "pkg:deb/ubuntu/libssl3@3.0.2-1?arch=amd64",
        "pkg:pypi/numpy@1.26.4",
    }
