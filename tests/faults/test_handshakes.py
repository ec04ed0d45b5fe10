"""TLS connections that never finish their handshake, and processes without free descriptors."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from canvasrt.containers.openai.connections import RESERVED
from canvasrt.containers.openai.descriptors import affordable
from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.alone import Alone, connect, is_open
from tests.helpers.certificates import tls_files
from tests.helpers.serving import eventually
from tests.helpers.serving_process import call

pytestmark = pytest.mark.acceptance

MOST = 64


@pytest.fixture
def held() -> Iterator[list[socket.socket]]:
    found: list[socket.socket] = []
    with ExitStack() as stack:
        stack.callback(lambda: [each.close() for each in found])
        yield found


def descriptors(front: FrontEnd) -> int:
    return len(os.listdir(f"/proc/{front.pid}/fd"))


def resident(front: FrontEnd) -> int:
    """Return the resident bytes of a front end."""
    pages = Path(f"/proc/{front.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def status(front: FrontEnd, certificates: Path, path: str = "/v1/version") -> int:
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    connection = http.client.HTTPSConnection("127.0.0.1", front.port, timeout=5, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_silent_tls_connections_have_places(
    alone: Alone, certificates: Path, held: list[socket.socket], tmp_path: Path
):
    """TLS connections count as soon as they are accepted, and are closed to make room, like other waiting
    connections."""
    secure = alone(tls=tls_files(certificates), max_connections=MOST)
    before = descriptors(secure)
    held += [connect(secure) for _ in range(500)]
    assert eventually(lambda: sum(map(is_open, held)) <= MOST + RESERVED)
    assert descriptors(secure) <= before + MOST + RESERVED
    assert status(secure, certificates) == 200  # one of them made room
    lines = (tmp_path / "front.log").read_text().splitlines()
    assert 1 <= sum("closing" in each for each in lines) <= 4


def test_a_pending_handshake_takes_little_memory(
    alone: Alone, certificates: Path, held: list[socket.socket]
):
    front = alone(tls=tls_files(certificates), max_connections=1024)
    assert status(front, certificates) == 200
    before = resident(front)
    held += [connect(front) for _ in range(1000)]
    assert eventually(lambda: descriptors(front) > 1000)
    assert status(front, certificates) == 200  # accepted after all earlier ones
    assert (resident(front) - before) / 1000 < 100_000


def test_a_process_without_descriptors_says_so_once_and_recovers(
    alone: Alone, held: list[socket.socket], tmp_path: Path
):
    front = alone()
    assert front.pid is not None
    resource.prlimit(front.pid, resource.RLIMIT_NOFILE, (100, 100))
    held += [connect(front) for _ in range(200)]  # the kernel queues the rest
    said, log = "cannot accept connections: Too many open files", tmp_path / "front.log"
    assert eventually(lambda: said in log.read_text())
    time.sleep(1)  # time for further log lines
    for each in held:
        each.close()
    assert eventually(lambda: is_answering(front))
    assert log.read_text().count(said) == 1
    assert len(log.read_text().splitlines()) < 300  # one line per request is allowed


def is_answering(front: FrontEnd) -> bool:
    try:
        return call(f"127.0.0.1:{front.port}", "/v1/version", timeout=2)[0] == 200
    except OSError:
        return False


def test_connections_are_limited_by_descriptors():
    assert affordable(1024, 20_000) == 1024
    assert affordable(1024, 1024) == 512
    assert affordable(1024, 1024, guards=True) == 170
