"""What `canvasrt doctor --report` writes, and what it omits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from canvasrt.cli.app import run
from canvasrt.cli.doctor import wsl_lacks
from canvasrt.cli.doctor_report import _caches, without_secrets

SECRETS = {
    "CANVASRT_API_KEYS": 'first-key,se"cond\\key',
    "CANVASRT_API_KEY": "a-clients-key",
    "CANVASRT_AGAINST_API_KEY": "another-clients-key",
    "CANVASRT_SIGNING_PASSWORD": "a-password",
    "HF_TOKEN": "a-token-of-mine",
    "NGC_API_KEY": "an-ngc-key",
    "NVIDIA_SECRET_OF_MINE": "a-word-of-mine",
    "OTHER_TOKEN": "another-token",
}


def test_a_report_has_what_is_asked_for_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-in-a-file\n", encoding="utf-8-sig")
    others = {"NIM_LOG_LEVEL": "DEBUG", "CANVASRT_API_KEYS_FILE": str(keys)}
    for name, text in {**SECRETS, **others, "XDG_STATE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, text)
    logs = tmp_path / "canvasrt"
    logs.mkdir()
    lines = [
        *("plan: {}", *["started"] * 1000),
        "it failed: out of memory",
        'keys first-key se"cond\\key key-in-a-file',
        "a-token-of-mine and another-token",
    ]
    (logs / "triton-8080.log").write_text(
        "\n".join([*lines, "Authorization: Bearer abcdefgh12345"])
    )
    out = tmp_path / "report.json"
    assert run(["doctor", "--report", str(out)]) == 0
    assert run(["doctor", "--report", str(out)]) == 1  # the file exists
    text = out.read_text()
    found = json.loads(text)
    assert found["checks"]
    assert found["packages"]["numpy"]
    assert found["variables"]["NIM_LOG_LEVEL"] == "DEBUG"
    assert found["caches"]
    (log,) = found["logs"].values()
    assert log[0] == "plan: {}"
    assert log[-4] == "it failed: out of memory"
    assert len(log) == 401
    parts = ("first-key", "cond", "key-in-a-file", "clients-key", "abcdefgh")
    for secret in (*parts, *SECRETS.values()):
        assert secret not in text


def test_a_broken_machine_is_reported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has a half-installed package, unreadable logs, a variable that is not UTF-8, and a check that fails.
    The API key is one digit, which is not removed from numbers."""
    (tmp_path / "half-1.0.dist-info").mkdir()
    logs = tmp_path / "canvasrt"
    (logs / "folder.log").mkdir(parents=True)
    (logs / "gone.log").symlink_to(tmp_path / "nothing")
    for name in ("good", "secret"):
        (logs / f"{name}.log").write_text("it failed\n")

    def last_lines(log: Path) -> list[str]:
        if log.name == "secret.log":
            raise PermissionError("not yours")
        return log.read_text().splitlines()

    def breaks() -> None:
        raise ValueError("no plan")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/x\udcff")
    monkeypatch.setenv("CANVASRT_API_KEY", "1")
    monkeypatch.setattr("canvasrt.containers.serve.output.last_lines", last_lines)
    monkeypatch.setattr("canvasrt.cli.doctor_report._plans", breaks)
    out = tmp_path / "report.json"
    assert run(["doctor", "--report", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["packages"]["numpy"]
    assert found["plans"] == "failed: ValueError('no plan')"
    assert found["variables"]["LD_LIBRARY_PATH"] == "/x\udcff"
    assert found["logs"] == {
        "good.log": ["it failed"],
        "secret.log": "failed: PermissionError('not yours')",
    }


def test_a_report_lists_the_compiled_kernels_in_a_container_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, the cache folder is named by NIM's variable."""
    for variable in ("NIM_CACHE_PATH", "CANVASRT_CACHE"):
        compiled = tmp_path / variable / "compiled"
        compiled.mkdir(parents=True)
        (compiled / "key").write_bytes(bytes(5))
        monkeypatch.setenv(variable, str(compiled.parent))
    found = _caches().values()
    assert len(found) == 2
    for cache in found:
        assert cache["compiled"] == {"key": 5}
        assert cache["free"] > 0


def test_what_looks_like_a_key_is_removed() -> None:
    text = "hf_abcdefghijk nvapi-0123456789 sk-abcdefgh12 tasks-12345678 short sk-1"
    assert without_secrets(text, []) == "[removed] [removed] [removed] tasks-12345678 short sk-1"


def test_what_windows_linux_lacks_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = "6.6.87.2-microsoft-standard-WSL2"
    assert wsl_lacks("6.8.0-45-generic", tmp_path) == ""
    assert "/dev/dxg" in wsl_lacks(release, tmp_path)
    device, library = tmp_path / "dev/dxg", tmp_path / "usr/lib/wsl/lib/libcuda.so.1"
    for file, lacks in ((device, "libcuda.so.1"), (library, "nvidia-smi")):
        file.parent.mkdir(parents=True)
        file.touch()
        assert lacks in wsl_lacks(release, tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/lib/wsl/lib/nvidia-smi")
    assert wsl_lacks(release, tmp_path) == ""
