"""`/v1/manifest` identifies the served bundle by its files' hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from canvasrt.containers.serve.serve import about_model
from canvasrt.containers.serve.serving_profiles import choose_profile
from tests.helpers.agents import SCRIPTS
from tests.helpers.alone import lone_front
from tests.helpers.scripted import Script, gemma_template, write_bundle


def test_the_manifest_has_the_digest_of_every_file(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "graphs", Script(SCRIPTS), gemma_template())
    about = about_model(bundle, choose_profile(bundle), 1024)
    with lone_front(names=("one", "two"), about=about) as front:
        manifest = front.get("/v1/manifest").json()
        assert "files" not in front.get("/v1/metadata").json()
    assert (manifest["model"], manifest["digest"]) == ("one", bundle.manifest.digest)
    assert manifest["profile"]["name"] == "onnxruntime-fp32-tp1-pp1"
    assert "body_0.onnx" in manifest["files"]
    assert about["thinking"]
    for name, each in manifest["files"].items():
        data = (bundle.path / name).read_bytes()
        assert each == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_ollama_is_told_what_the_model_can_do() -> None:
    for able in (True, False):
        about = {"vision": able, "thinking": able}
        with lone_front(names=("one",), about=about) as front:
            shown = front.post("/api/show", json={"model": "one"}).json()
        assert [each in shown["capabilities"] for each in about] == [able, able]
