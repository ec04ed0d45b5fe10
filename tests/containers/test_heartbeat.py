"""Reading the heartbeat is correct, however often it is written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canvasrt.containers.heartbeat import Heartbeat, acknowledged, silence, silence_at

# Writes the heartbeat as often as possible until standard input ends.
_BEAT = """
import select, sys
from canvasrt.containers.heartbeat import Heartbeat
heartbeat = Heartbeat.at(sys.argv[1])
print("beating", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(100_000):
        heartbeat.beat()
"""


def test_no_beat_looks_like_one_of_long_ago(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    command = [sys.executable, "-c", _BEAT, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as beating:
        assert beating.stdout is not None
        assert beating.stdin is not None
        assert beating.stdout.readline() == b"beating\n"
        deadline, longest = time.monotonic() + 3, 0.0
        while time.monotonic() < deadline:
            longest = max(longest, silence_at(file) or 0.0)
        beating.stdin.close()
    # A torn read would give a time near the machine's boot, far longer ago than the 30 seconds that a busy machine may
    # take.
    assert longest < min(30, time.monotonic() / 2)


def test_silence_ends_with_a_beat(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    assert silence_at(file) is None
    heartbeat = Heartbeat.at(file)
    time.sleep(0.05)
    assert (silence_at(file) or 0) >= 0.05
    begin = time.monotonic()
    heartbeat.beat()
    assert 0 < (silence_at(file) or 0) <= time.monotonic() - begin


def test_a_full_disk_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk had no space for a mapped file, the first beat would end the process by a signal."""
    Heartbeat.at(tmp_path / "one")
    assert (tmp_path / "one").stat().st_blocks

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Heartbeat.at(tmp_path / "two")


def test_reports_that_were_heard_are_counted() -> None:
    descriptor = os.memfd_create("heartbeat")
    assert (acknowledged(descriptor), silence(descriptor)) == (0, None)
    heartbeat = Heartbeat(descriptor)
    for count in range(3):
        assert acknowledged(descriptor) == count
        heartbeat.acknowledge()
    os.ftruncate(descriptor, 0)  # as the next process does
    assert acknowledged(descriptor) == 0
    os.close(descriptor)
