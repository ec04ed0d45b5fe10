"""The front end's process. Its supervisor speaks to it on standard input, a line at a time.

The first line is the settings; each later one is `{"phase": ..., "detail": ...}`. The end of the input
is the end of the supervisor, and of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from canvasrt.containers.logs import configure
from canvasrt.containers.openai.app import make_app, make_health_app
from canvasrt.containers.openai.state import Settings, State

# After the last answer: for callers that were about to send something when they were told to go.
_LINGER = 0.3
_LOOK_EVERY = 0.02
_LOOK_IDLE = 0.1
_CLOSE_TIMEOUT = 2


class _Uvicorn(uvicorn.Server):
    """Signals are the supervisor's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Serves until the supervisor says to stop."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Without a buffer, whose lock the thread that waits for more would hold to the end.
    told = io.FileIO(0, closefd=False)
    settings = Settings.from_line(told.readline())
    configure(settings.log_level, settings.json_logs)
    asyncio.run(_serve(settings, State(), told))


async def _serve(settings: Settings, state: State, told: io.FileIO) -> None:
    servers = [(_server(settings, state), settings.socket)]
    if settings.health_socket is not None:
        servers.append((_health_server(settings, state), settings.health_socket))
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(loop, state, told), daemon=True).start()
    loop.add_signal_handler(signal.SIGTERM, _apply, state, {"phase": "stopping"})
    running = [
        asyncio.create_task(server.serve([socket.socket(fileno=number)]))
        for server, number in servers
    ]
    drained = asyncio.create_task(_drained(state))
    await asyncio.wait([drained, *running], return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*running)


async def _drained(state: State) -> None:
    """Returns when the server is stopping and no request is left."""
    while state.phase != "stopping":
        await asyncio.sleep(_LOOK_IDLE)
    while state.in_flight:
        await asyncio.sleep(_LOOK_EVERY)
    await asyncio.sleep(_LINGER)
    while state.in_flight:
        await asyncio.sleep(_LOOK_EVERY)


def _listen(loop: asyncio.AbstractEventLoop, state: State, told: io.FileIO) -> None:
    """Reads what the supervisor says; on a thread, since standard input may be anything."""
    for line in told:
        loop.call_soon_threadsafe(_apply, state, json.loads(line))
    os._exit(1)  # nobody is there to stop us


def _apply(state: State, told: dict[str, Any]) -> None:
    if state.phase != "stopping":
        state.phase = told["phase"]
        state.detail = told.get("detail", "")


def _server(settings: Settings, state: State) -> _Uvicorn:
    options: dict[str, Any] = {}
    if settings.tls is not None:
        options["ssl_certfile"] = settings.tls["certificate"]
        options["ssl_keyfile"] = settings.tls["key"]
        if settings.tls.get("ca"):
            options["ssl_ca_certs"] = settings.tls["ca"]
            options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
    return _Uvicorn(_config(make_app(settings, state), **options))


def _health_server(settings: Settings, state: State) -> _Uvicorn:
    return _Uvicorn(_config(make_health_app(settings, state)))


def _config(app: Any, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=_CLOSE_TIMEOUT,
        **options,
    )


if __name__ == "__main__":
    main()
