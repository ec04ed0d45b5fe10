"""Front ends without Triton, as processes or on a thread, and sockets that connect to them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from canvasrt.containers.openai.app import make_app
from canvasrt.containers.openai.connections import Places
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.options import FrontOptions, FrontSettings
from canvasrt.containers.serve.frontend import FrontEnd

Alone = Callable[..., FrontEnd]


def lone_front(**options: Any) -> TestClient:
    """Return a client of a front end in this process. The front end is in the phase "serving"."""
    made = FrontOptions(hosts=("*",), **options)
    settings = FrontSettings(0, "127.0.0.1:1", "http://127.0.0.1:1", made)
    return TestClient(make_app(settings, ServerState(phase="serving")))


@contextlib.contextmanager
def fronts(folder: Path) -> Iterator[Alone]:
    """Provide a function that starts front ends. They have no Triton, unless the options have its address, `triton`, or
    the URL of its `metrics`. Their log is front.log in `folder`."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> FrontEnd:
            url = options.pop("metrics", "http://127.0.0.1:1/metrics")
            triton = options.pop("triton", "127.0.0.1:1")
            timeout = options.pop("request_timeout", None)
            made = FrontOptions(**{"port": 0, **options})
            log = folder / "front.log"
            return stack.enter_context(FrontEnd(made, triton, url, log, timeout))

        yield start


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    """A function that starts front ends for one test."""
    with fronts(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    """A front end with default options."""
    with fronts(tmp_path_factory.mktemp("front")) as start:
        yield start()


def connect(front: FrontEnd) -> socket.socket:
    """Return a connection on which nothing was sent."""
    return socket.create_connection(("127.0.0.1", front.port), timeout=20)


def is_open(connection: socket.socket) -> bool:
    """Return whether the other end keeps an idle connection open."""
    connection.settimeout(0.01)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def listening(
    app: Any, limit: int = 8, context: ssl.SSLContext | None = None
) -> Iterator[tuple[int, Places]]:
    """Serve an application on a thread of this process; provide its port and the places of its connections."""
    places = Places(limit, context)
    http: Any = places.connection
    config = uvicorn.Config(app, http=http, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1], places
        finally:
            server.should_exit = True
            thread.join()
