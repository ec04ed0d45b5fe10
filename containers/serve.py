"""The life of `canvasrt serve`: start, tell where it listens, wait for a signal, stop."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canvasrt.bundle import load_bundle
from canvasrt.cli.output import console, emit
from canvasrt.containers.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.server import EXIT_TIMEOUT, READY_TIMEOUT, Server, ServerError
from canvasrt.containers.signals import StopRequest, stop_request
from canvasrt.errors import CanvasError

_LOOK_EVERY = 0.2


@dataclass(frozen=True)
class Settings:
    """The options of `canvasrt serve`. `log` is a file, `-` for stderr, or None for the default."""

    host: str = "127.0.0.1"
    ports: Ports = field(default_factory=Ports)
    log: str | None = None
    verbose: bool = False
    ready_timeout: float = READY_TIMEOUT
    exit_timeout: int = EXIT_TIMEOUT
    threads: int | None = None
    as_json: bool = False

    @property
    def log_file(self) -> Path | None:
        """Where Triton's output goes; None for stderr."""
        if self.log == "-":
            return None
        return Path(self.log) if self.log else default_log(self.ports.http)


def default_log(http_port: int) -> Path:
    """The log of the server on this port, in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "canvasrt" / f"triton-{http_port}.log"


def run(path: Path, settings: Settings) -> None:
    """Serves a bundle until a signal comes. CanvasError when it cannot start or ends by itself."""
    settings = replace(settings, ports=settings.ports.resolve(settings.host))
    # The engines' hashes are checked once, by the model that loads them.
    bundle = load_bundle(path, kind=("package", "engines", "graphs"), check=False)
    with repository_of(bundle) as repository, stop_request() as stop:
        server = Server(
            repository,
            host=settings.host,
            ports=settings.ports,
            log=settings.log_file,
            exit_timeout=settings.exit_timeout,
            threads=settings.threads,
        )
        with _following(settings, server.log):
            try:
                _serve(server, settings, stop)
            except ServerError as error:
                for line in [] if settings.verbose else error.log_tail:
                    print(line, file=sys.stderr)
                raise
            finally:
                ended = server.stop(force=stop.insisted)
    if not ended:
        raise CanvasError(
            f"requests were still running after {settings.exit_timeout} s and were cut off",
            "allow more with --exit-timeout",
        )


def _serve(server: Server, settings: Settings, stop: StopRequest) -> None:
    server.start()
    server.wait_ready(settings.ready_timeout, stop.asked)
    if not stop.asked.is_set():
        _tell(server, settings.as_json)
    while not stop.asked.wait(_LOOK_EVERY):
        server.check_alive()
    if not settings.as_json:
        console(stderr=True).print("stopping; once more to stop at once")


def _tell(server: Server, as_json: bool) -> None:
    host, ports = server.address, server.ports
    data: dict[str, Any] = {
        "http": f"{host}:{ports.http}",
        "grpc": f"{host}:{ports.grpc}",
        "metrics": f"http://{host}:{ports.metrics}/metrics",
        "log": str(server.log) if server.log else None,
        "pid": server.pid,
    }

    def render(shown: Any) -> None:
        shown.print(f"ready   http {data['http']}   grpc {data['grpc']}", markup=False)
        shown.print(f"metrics {data['metrics']}", markup=False)
        if data["log"]:
            shown.print(f"log     {data['log']}", markup=False)
        shown.print(f"try     canvasrt infer '12+34=' --url {data['http']}", markup=False)

    emit(data, as_json, render)
    sys.stdout.flush()


@contextmanager
def _following(settings: Settings, log: Path | None) -> Iterator[None]:
    """Copies what is added to the log to stderr, for --verbose."""
    if not settings.verbose or log is None:
        yield
        return
    log.unlink(missing_ok=True)  # an earlier server's
    done = threading.Event()
    thread = threading.Thread(target=_follow, args=(log, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _follow(log: Path, done: threading.Event) -> None:
    position = 0
    while True:
        last = done.is_set()
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                sys.stderr.buffer.write(file.read())
                sys.stderr.flush()
                position = file.tell()
        if last:
            return
        done.wait(_LOOK_EVERY)
