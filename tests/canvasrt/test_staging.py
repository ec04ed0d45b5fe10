"""Staging: whatever happens during a write, no half-written folder is left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.staging import check_output, scratch, staging, system_error
from tests.helpers.serving import eventually


def write_some(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "weights" / "part").write_bytes(b"1234")


def everything_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def in_a_process(code: str, out: Path) -> subprocess.Popen[str]:
    """Run `code` inside `with staging(out) as tmp:` in a separate process. In it, `say` prints."""
    lines = """
import os, signal, sys, time
from pathlib import Path
from canvasrt.staging import staging
with staging(Path(sys.argv[1])) as tmp:
    (tmp / "part").write_bytes(b"1234")
"""
    command = [sys.executable, "-c", lines + textwrap.indent(textwrap.dedent(code), "    "), out]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize("there", [False, True])
def test_the_folder_appears_when_the_block_ends(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "deep" / "er" / "out"
    if there:  # an empty folder
        out.mkdir(parents=True)
    with staging(out) as tmp:
        write_some(tmp)
        assert not list(out.glob("*"))
        assert tmp.parent == out.parent  # same disk, so a rename works
    folders = ["deep", "deep/er", "deep/er/out", "deep/er/out/weights"]
    assert everything_in(tmp_path) == [*folders, "deep/er/out/weights/part"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit, CanvasError])
def test_a_failure_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), staging(tmp_path / "new" / "out") as tmp:
        write_some(tmp)
        raise failure("no")
    assert everything_in(tmp_path) == []


def test_a_folder_with_content_is_refused_and_kept(tmp_path: Path) -> None:
    write_some(tmp_path)
    with pytest.raises(CanvasError, match="not empty"), staging(tmp_path):
        pytest.fail("the block must not run")
    assert everything_in(tmp_path) == ["weights", "weights/part"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CanvasError, match="is a file"), staging(out):
            pytest.fail("the block must not run")


def test_an_empty_folder_that_cannot_be_replaced_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, how: path != tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(CanvasError, match=f"{tmp_path} is not writable"):
        check_output(tmp_path / "out")


def test_a_mounted_disk_is_refused_at_once(small_disk: Path) -> None:
    with pytest.raises(CanvasError, match="is a mount point") as raised:
        check_output(small_disk)
    assert raised.value.hint == f"name a folder in it: {small_disk / 'new'}"


def test_something_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CanvasError, match="in the meantime"), staging(out) as tmp:
        write_some(tmp)
        out.mkdir()
        (out / "other").write_text("kept")
    assert everything_in(tmp_path) == ["out", "out/other"]


def test_leftovers_of_killed_processes_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    killed = in_a_process("os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "out")
    killed.wait(timeout=60)
    killed.stdout.close()  # type: ignore[union-attr]
    assert everything_in(tmp_path)[0] == f".out.partial-{killed.pid}"
    (tmp_path / f".out.partial-{os.getppid()}").mkdir()
    (tmp_path / ".out2.partial-1").mkdir()
    with staging(tmp_path / "out") as tmp:
        write_some(tmp)
    left = [path.name for path in tmp_path.iterdir()]
    assert sorted(left) == [f".out.partial-{os.getppid()}", ".out2.partial-1", "out"]


def test_scratch_space_is_gone_afterwards(tmp_path: Path) -> None:
    with scratch(tmp_path / "deep" / "work") as tmp:
        write_some(tmp)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = in_a_process("print('writing', flush=True); time.sleep(60)", tmp_path / "new" / "out")
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert everything_in(tmp_path) != []
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    process.stdout.close()
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("early", [False, True])
def test_a_signal_during_a_destructor_is_not_lost(tmp_path: Path, early: bool) -> None:
    """`early`: the signal is sent again so soon that Python still handles the ignored exit, and ignores the next one."""
    code = """
        import threading

        later = threading.Timer

        def now(seconds, do, args):
            threading.Timer = later
            do(*args)
            return later(0, int)

        if EARLY:
            threading.Timer = now

        class Dropped:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)

        Dropped()
        time.sleep(60)
    """
    process = in_a_process(code.replace("EARLY", str(early)), tmp_path / "out")
    process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGTERM
    assert everything_in(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a disk here")
    yield folder
    eventually(lambda: not subprocess.run(["umount", folder], capture_output=True).returncode, 5)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(small_disk: Path) -> None:
    """On a full disk, NumPy raises an OSError without an errno."""
    for write in (lambda file: file.write_bytes(bytes(2**21)), np.zeros(2**21, np.uint8).tofile):
        with pytest.raises(CanvasError, match="no space left"), staging(small_disk / "out") as tmp:
            write(tmp / "big")
        assert everything_in(small_disk) == []


def test_a_limit_on_file_sizes_is_one_clear_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(CanvasError) as raised, staging(tmp_path / "out") as tmp:
            (tmp / "big").write_bytes(bytes(2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = f"no space left while writing {tmp_path / 'out'}; its unfinished files were removed"
    assert raised.value.message == said
    assert "finished work in the cache is reused" in raised.value.hint
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG])
def test_what_the_system_refuses_is_no_bug(code: int) -> None:
    found = system_error(OSError(code, os.strerror(code), "/some/path"))
    assert found is not None
    assert found.message == f"/some/path: {os.strerror(code)}"


def test_a_machine_without_a_temporary_folder_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(FileNotFoundError) as refused:
        tempfile._get_default_tempdir()  # type: ignore[attr-defined]
    found = system_error(refused.value)
    assert found is not None
    assert "No usable temporary directory" in found.message
