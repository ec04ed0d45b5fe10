"""The cache of builds, and when an entry is not reused."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from canvasrt import cache
from canvasrt import hashes as memo
from canvasrt.bundle import Bundle
from canvasrt.cache import GraphCache, code_hash, key_of, lock_graphs, unfinished
from canvasrt.containers.serve import prepare
from canvasrt.containers.serve.build_engines import Wait
from canvasrt.errors import CanvasError
from canvasrt.hashes import HashMemo, hash_files

Making = tuple[Callable[[Path], None], list[Path]]
WHAT = {"files": {"model.safetensors": "0" * 64}, "precision": "bf16"}


@pytest.fixture
def making(demo_graphs: Bundle) -> Making:
    """Return a function that makes a bundle, and the list of folders for which it was called."""
    asked: list[Path] = []

    def make(out: Path) -> None:
        asked.append(out)
        shutil.copytree(demo_graphs.path, out)

    return make, asked


def test_the_same_is_made_once(making: Making, demo_graphs: Bundle, tmp_path: Path) -> None:
    make, asked = making
    cache = GraphCache(tmp_path)
    assert cache.find(WHAT) is None
    first = cache.get(WHAT, make)
    assert cache.find(WHAT)
    assert first.manifest == demo_graphs.manifest
    assert cache.get(WHAT, make).path == first.path == tmp_path / "graphs" / key_of(WHAT)
    assert len(asked) == 1
    cache.get({**WHAT, "precision": "fp32"}, make)
    assert len(asked) == 2


def test_what_was_damaged_is_made_again(making: Making, tmp_path: Path) -> None:
    make, asked = making
    cache = GraphCache(tmp_path)
    file = cache.get(WHAT, make).file("body_0.onnx")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert cache.get(WHAT, make).file("body_0.onnx").read_bytes() == content
    assert len(asked) == 2


def test_what_killed_builds_of_other_graphs_left_is_removed(making: Making, tmp_path: Path) -> None:
    make, _ = making
    left, own = (tmp_path / "graphs" / f".key.partial-{pid}" for pid in (99999999, os.getppid()))
    left.mkdir(parents=True)
    own.mkdir()
    GraphCache(tmp_path).get(WHAT, make)
    assert not left.exists()
    assert own.exists()


def test_what_another_build_made_meanwhile_is_taken(making: Making, tmp_path: Path) -> None:
    make, _ = making

    def late(out: Path) -> None:
        make(out)
        raise CanvasError(f"{out} exists")

    assert GraphCache(tmp_path).get(WHAT, late).manifest.kind == "graphs"


def test_interrupted_works_with_other_inputs_stay_within_a_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The most recently written folders are kept."""
    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_KEPT_BYTES", 250_000)
    rooms = []
    for written in (3, 1, 2, 4):
        with contextlib.suppress(KeyboardInterrupt), unfinished("works", {"n": written}) as room:
            rooms.append(room)
            (room / "state").write_bytes(bytes(100_000))
            for each in (room / "state", room):
                os.utime(each, (written, written))
            raise KeyboardInterrupt
    assert [each.is_dir() for each in rooms] == [True, False, True, True]
    with unfinished("works", {"n": 3}) as room:
        assert (room / "state").stat().st_size == 100_000
    assert [each.is_dir() for each in rooms] == [False, False, True, True]


def test_a_disk_without_locks_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without locks, nothing is removed, since another process may use it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_KEPT_BYTES", 0)
    (other := tmp_path / "works" / "other").mkdir(parents=True)
    (other / "state").write_bytes(b"state")
    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        lock_graphs([{"n": 1}]),
        unfinished("works", {"n": 1}),
        prepare.alone(tmp_path / "out", Wait()),
    ):
        assert (other / "state").exists()


def test_a_change_of_the_sources_changes_the_key(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "b.py"
    file.write_text("x = 1\n")
    before = code_hash([tmp_path])
    assert code_hash([tmp_path]) == before
    file.write_text("x = 2\n")
    assert code_hash([tmp_path]) != before


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A file that counts as large and old enough to be remembered, and a list of names that were hashed."""
    monkeypatch.setattr(memo, "LARGE_FILE", 100)
    monkeypatch.setattr(memo, "_SETTLED", -(10**12))
    hashed: list[str] = []

    def noted(root: Path, names: list[str], doing: str = "") -> dict[str, str]:
        hashed.extend(names)
        return hash_files(root, names)

    monkeypatch.setattr(memo, "hash_files", noted)
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(200))
    return file, hashed


def test_a_large_file_is_hashed_once_unless_it_changed(
    large: tuple[Path, list[str]], tmp_path: Path
) -> None:
    file, hashed = large
    (tmp_path / "small").write_bytes(b"small")
    names = [file.name, "small"]
    (tmp_path / "memo.json").write_text("[")  # a damaged memo is ignored
    for _ in range(2):
        found = HashMemo(tmp_path / "memo.json").hash_files(tmp_path, names)
        assert found == hash_files(tmp_path, names)
    assert hashed == [*names, "small"]
    times = file.stat()
    file.write_bytes(bytes(199) + b"1")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # this cannot reset ctime
    found = HashMemo(tmp_path / "memo.json").hash_files(tmp_path, [file.name])
    assert found == hash_files(tmp_path, [file.name])


def test_a_file_of_this_moment_is_not_remembered(
    large: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, hashed = large
    monkeypatch.setattr(memo, "_SETTLED", 10**12)
    for _ in range(2):
        HashMemo(tmp_path / "memo.json").hash_files(tmp_path, [file.name])
    assert len(hashed) == 2


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an account has no home, such as the number given to a container's `--user`."""
    for variable in ("CANVASRT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(CanvasError, match="no home folder") as error:
        cache.cache_folder()
    assert "HOME or XDG_CACHE_HOME" in error.value.hint
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert str(cache.cache_folder()) == "/else/canvasrt"
