"""Files on disk: engines in the cache, staged folders, and logs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import canvasrt.containers.serve.output as output_module
from canvasrt.bundle import Bundle
from canvasrt.containers.serve.build_engines import Wait
from canvasrt.containers.serve.output import ServerOutput
from canvasrt.containers.serve.prepare import engines_folder, set_aside_damaged
from canvasrt.containers.serve.serving_profiles import profiles_of
from canvasrt.containers.serve.settings import Settings
from canvasrt.staging import staging
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, serving


@needs_triton
def test_a_damaged_cache_entry_is_built_again(graphs: Bundle, engines: Bundle, tmp_path: Path):
    (profile,) = profiles_of(graphs)
    out = engines_folder(profile, tmp_path / "cache")
    out.parent.mkdir(parents=True)
    shutil.copytree(engines.path, out)
    body = out / "body_0.bin"
    body.write_bytes(body.read_bytes()[:-64] + bytes(range(64)))
    options = (*ANY_PORTS, "--cache", str(tmp_path / "cache"))
    with serving(graphs.path, tmp_path, *options) as running:
        with running.client() as client:
            assert client.infer({"prompt": "12+34=", "max_new_tokens": 3}).token_ids
        errors = running.stop(signal.SIGTERM)
        assert running.process.returncode == 0
    assert "damaged" in errors
    assert [each.name for each in out.parent.glob(f"{out.name}.damaged*")]
    assert body.read_bytes() == (engines.path / "body_0.bin").read_bytes()


@pytest.mark.parametrize(("file", "left"), [("manifest.json", "{"), ("body_0.bin", None)])
def test_an_entry_that_lacks_a_part_is_damaged(
    engines: Bundle, tmp_path: Path, file: str, left: str | None
):
    shutil.copytree(engines.path, out := tmp_path / "out")
    assert not set_aside_damaged(out, Wait())
    (out / file).unlink()
    if left:
        (out / file).write_text(left)
    assert set_aside_damaged(out, Wait())
    assert not out.exists()


def test_what_is_renamed_into_place_is_synced_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(re.sub(r"\.out\.partial-\d+", "tmp", os.path.relpath(path, tmp_path)))
        real_sync(descriptor)

    def rename(source: Any, to: Any) -> None:
        events.append("rename")
        real_rename(source, to)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    with staging(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"1")
        (folder / "manifest").write_bytes(b"2")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert set(before) == {"tmp/inner/weights", "tmp/manifest", "tmp/inner", "tmp"}
    assert after == ["."]


def test_only_files_are_moved_aside_for_a_log(tmp_path: Path):
    folder, device = tmp_path / "folder", tmp_path / "device"
    folder.mkdir()
    device.symlink_to(os.devnull)
    with ServerOutput(Settings(log=str(device)), sys.stderr):
        pass
    with pytest.raises(IsADirectoryError), ServerOutput(Settings(log=str(folder)), sys.stderr):
        pass
    assert sorted(each.name for each in tmp_path.iterdir()) == ["device", "folder"]


def test_a_link_for_a_log_stays_and_its_file_is_continued(tmp_path: Path):
    file, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    file.parent.mkdir()
    file.write_text("of another program\n")
    link.symlink_to(file)  # like /dev/stdout
    with ServerOutput(Settings(log=str(link)), sys.stderr) as output:
        output.note("ours")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["elsewhere", "file", "link"]
    assert link.is_symlink()
    assert file.read_text() == "of another program\nours\n"


def test_a_pipe_for_a_log_hides_no_failure(tmp_path: Path):
    code = "from canvasrt.containers.serve.output import *; print(last_lines(Path('/dev/stdout')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_logs_rotate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_module, "LOG_BYTES", 10_000, raising=False)
    monkeypatch.setattr(output_module, "_LOOK_EVERY", 0.02)
    log = tmp_path / "log"
    log.write_text("of the last run\n")
    with ServerOutput(Settings(log=str(log)), sys.stderr):
        assert (tmp_path / "log.1").read_text() == "of the last run\n"
        with log.open("ab") as file:  # a server also keeps it open
            for number in range(2000):
                file.write(f"line {number:06} {'x' * 90}\n".encode())
                file.flush()
                if number % 100 == 99:
                    assert eventually(lambda: log.stat().st_size <= 20_000)
        assert (tmp_path / "log.1").stat().st_size <= 30_000
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "log.1"]
    assert "line 001999" in log.read_text() + (tmp_path / "log.1").read_text()
