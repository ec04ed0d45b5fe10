"""The front end's process, which its supervisor controls through lines on standard input.

The first line holds the settings. Each later line (there is at least one) reports a phase:
`{"phase": ..., "detail": ...}`. When the supervisor exits, the input ends; this process then exits, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import uvicorn

from canvasrt.containers.heartbeat import Heartbeat
from canvasrt.containers.logs import configure
from canvasrt.containers.openai.app import make_app, make_health_app
from canvasrt.containers.openai.auth import Callers
from canvasrt.containers.openai.connections import Places
from canvasrt.containers.openai.descriptors import affordable, raise_file_limit, report_seldom
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.options import FrontSettings
from canvasrt.containers.openai.tls import renew, server_context
from canvasrt.containers.openai.triton_grpc import start_grpc_guard
from canvasrt.containers.openai.triton_http import make_triton_app
from canvasrt.containers.ports import BACKLOG

# Seconds to wait, after the last answer, for requests that are already in transit.
_LINGER = 0.3
_LOOK_EVERY = 0.02
_LOOK_IDLE = 0.1
_CLOSE_TIMEOUT = 2
_BEAT_EVERY = 0.5
# Maximum connections accepted per iteration of the event loop. A new connection counts towards the connection limit
# only some iterations later, so a larger number could exhaust the file descriptors.
_ACCEPT = 64
# Seconds for which a thread that parses a long body may keep the interpreter's lock. The event loop releases the lock
# at every system call, about ten times per request. With Python's default limit, the loop could wait 5 ms each time to
# get the lock back.
_SWITCH = 0.0005
HEALTH_CONNECTIONS = 128  # maximum connections of the port that only serves health routes


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that handles no signals and lets the kernel queue waiting connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio also limits the kernel's queue to `_ACCEPT`, so raise that limit again.
        for each in sockets or ():
            each.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Serve until the supervisor requests a stop."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH)
    # Unbuffered: a thread that waits in a buffered read holds the buffer's lock, and Python can then abort at exit.
    commands = io.FileIO(0, closefd=False)
    settings = FrontSettings.from_line(commands.readline())
    configure(settings.options.log_level, settings.options.json_logs)
    guards = settings.triton_socket is not None
    most = affordable(settings.options.max_connections, raise_file_limit(), guards)
    state = ServerState(callers=Callers(settings.options.max_key_requests))
    asyncio.run(_serve(settings, most, state, commands))


async def _serve(
    settings: FrontSettings, most: int, state: ServerState, commands: io.FileIO
) -> None:
    files = settings.options.tls
    places = Places(most, server_context(files) if files else None)
    servers = [(_server(settings, state, places), settings.socket)]
    if settings.health_socket is not None:
        servers.append((_health_server(settings, state), settings.health_socket))
    if settings.triton_socket is not None:
        servers.append((_triton_server(settings, most, state), settings.triton_socket))
    heartbeat = Heartbeat(settings.heartbeat) if settings.heartbeat is not None else None
    hear = functools.partial(_hear, state, heartbeat)
    hear(commands.readline())  # before listening, so that no caller sees an outdated phase
    loop = asyncio.get_running_loop()
    report_seldom(loop)
    threading.Thread(target=_listen, args=(loop, hear, commands), daemon=True).start()
    loop.add_signal_handler(signal.SIGTERM, _apply, state, {"phase": "stopping"})
    running = [
        asyncio.create_task(server.serve([socket.socket(fileno=number)]))
        for server, number in servers
    ]
    guard = await start_grpc_guard(settings, state) if settings.grpc_address else None
    background = [asyncio.create_task(_beat(heartbeat))]
    if files is not None:
        background.append(asyncio.create_task(renew(places, files)))
    drained = asyncio.create_task(_drained(state))
    await asyncio.wait([drained, *running], return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    for server, _ in servers:
        server.should_exit = True
    if guard is not None:
        await guard.stop(None)
    await asyncio.gather(*running)
    for each in background:
        each.cancel()


async def _beat(heartbeat: Heartbeat | None) -> None:
    """Send heartbeats, which show the supervisor that the event loop is running."""
    while heartbeat is not None:
        heartbeat.beat()
        await asyncio.sleep(_BEAT_EVERY)


async def _drained(state: ServerState) -> None:
    """Wait until the server is stopping and no request is in flight."""
    while state.phase != "stopping":
        await asyncio.sleep(_LOOK_IDLE)
    while state.in_flight:
        await asyncio.sleep(_LOOK_EVERY)
    await asyncio.sleep(_LINGER)
    while state.in_flight:
        await asyncio.sleep(_LOOK_EVERY)


def _listen(
    loop: asyncio.AbstractEventLoop, hear: Callable[[bytes], None], commands: io.FileIO
) -> None:
    """Read the supervisor's reports. This runs on a thread, because asyncio cannot watch every kind of standard
    input."""
    for line in commands:
        loop.call_soon_threadsafe(hear, line)
    os._exit(1)  # the supervisor has exited


def _hear(state: ServerState, heartbeat: Heartbeat | None, line: bytes) -> None:
    """Apply one report, and acknowledge it to the supervisor."""
    if not line:
        return
    _apply(state, json.loads(line))
    if heartbeat is not None:
        heartbeat.acknowledge()


def _apply(state: ServerState, report: dict[str, Any]) -> None:
    if state.phase != "stopping":
        state.phase = report["phase"]
        state.detail = report.get("detail", "")


def _server(settings: FrontSettings, state: ServerState, places: Places) -> _Uvicorn:
    return _Uvicorn(_config(make_app(settings, state, places), places))


def _health_server(settings: FrontSettings, state: ServerState) -> _Uvicorn:
    return _Uvicorn(_config(make_health_app(settings, state), Places(HEALTH_CONNECTIONS)))


def _triton_server(settings: FrontSettings, most: int, state: ServerState) -> _Uvicorn:
    places = Places(most)
    return _Uvicorn(_config(make_triton_app(settings, state, places), places, "off"))


def _config(app: Any, places: Places, lifespan: Literal["on", "off"] = "on") -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=places.connection,  # type: ignore[arg-type]
        backlog=_ACCEPT,
        log_config=None,
        access_log=False,
        proxy_headers=False,  # callers must not be able to forge their address
        server_header=False,
        loop="asyncio",
        ws="none",
        lifespan=lifespan,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT,
    )


if __name__ == "__main__":
    main()
