"""Which tritonserver is used, the error without one, and the ports and shared memory of servers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from canvasrt.containers import processes
from canvasrt.containers.ports import Ports, bind
from canvasrt.containers.serve import installation
from canvasrt.containers.serve.installation import find_installation
from canvasrt.errors import CanvasError
from tests.helpers.serving import needs_triton


def program(folder: Path) -> Path:
    file = folder / "tritonserver"
    file.write_text("#!/bin/sh\necho tritonserver 9.9.9\n")
    file.chmod(0o755)
    return file


def test_the_environment_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named, other = tmp_path / "a", tmp_path / "b"
    named.mkdir()
    other.mkdir()
    program(other)
    monkeypatch.setenv("PATH", str(other))
    assert find_installation().binary == other / "tritonserver"
    monkeypatch.setenv("CANVASRT_TRITONSERVER", str(program(named)))
    found = find_installation()
    assert found.binary == named / "tritonserver"
    assert found.bundled is None


@needs_triton
def test_without_one_on_the_path_the_wheels_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    found = find_installation()
    assert found.bundled is not None
    assert found.binary.parent.parent == found.bundled


def test_without_any_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CanvasError, match="no tritonserver") as refused:
        find_installation()
    assert "pip install" in refused.value.hint


@needs_triton
def test_a_missing_libpython_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(installation, "_libpython_folders", list)
    monkeypatch.setattr(installation, "_loads_libpython", lambda: False)
    with pytest.raises(CanvasError, match="libpython3") as refused:
        find_installation()
    assert "apt install libpython3" in refused.value.hint


def test_free_ports_are_distinct_and_held_until_triton_takes_them():
    """Triton starts long after its ports are chosen. In between, the front end asks for a free port, which must be
    another."""
    with Ports(0, 0, 0).held("127.0.0.1") as ports:
        numbers = [ports.http, ports.grpc, ports.metrics]
        assert len({*numbers, 0}) == 4
        for number in numbers:
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("127.0.0.1", number))
            bind("127.0.0.1", number, "--http-port").close()  # Triton can still bind it
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports.http))


@pytest.mark.parametrize(
    ("ports", "host", "says"),
    [
        (Ports(70000, 0, 0), "127.0.0.1", "--http-port is 70000.*give a port from 1 to 65535"),
        (Ports(0, 0, 0), "203.0.113.7", "not an address of this machine"),
        (Ports(0, 0, 0), "no.such.host.invalid", "not an address of this machine"),
        (Ports(7001, 7001, 0), "127.0.0.1", "--http-port and --grpc-port are both 7001"),
    ],
)
def test_ports_that_cannot_be_used(ports: Ports, host: str, says: str):
    with pytest.raises(CanvasError) as refused, ports.held(host):
        pass
    assert re.search(says, f"{refused.value}; {refused.value.hint}")


def test_only_what_dead_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    mine = processes.run_name()
    namespace = mine.split("-")[1]
    dead = f"canvasrt-{namespace}-{2**22 + 1}-00000000-"  # not a possible process id
    elsewhere = f"canvasrt-1-{2**22 + 1}-00000000-"
    for name in (f"{mine}a", f"{dead}a", f"{elsewhere}a", "canvasrt-other", "another"):
        (tmp_path / name).touch()
    processes.remove_stale()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [f"{mine}a", f"{elsewhere}a", "canvasrt-other", "another"]
    )


def test_what_a_killed_container_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pod's /dev/shm outlives its containers. Process ids say nothing there, since every server has process id 1."""
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    own = processes.run_name()  # left by an earlier process with this process's id
    other, live = "canvasrt-1-1-00000000-", "canvasrt-1-1-00000001-"
    for name in (own, other, live):
        (tmp_path / f"{name}lock").touch()
        (tmp_path / f"{name}region").touch()
    with contextlib.suppress(OSError), processes.holding(live) as held:
        server = subprocess.Popen(["sleep", "60"], pass_fds=[held])
        os.close(held)  # as if this process had been killed
        processes.remove_stale()
        assert sorted(each.name for each in tmp_path.iterdir()) == [f"{live}lock", f"{live}region"]
        server.kill()
        server.wait()
        processes.remove_stale()
    assert not list(tmp_path.iterdir())
