"""The life of `canvasrt serve`: choose the engines, start, tell where it listens, wait, stop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from canvasrt.bundle import Bundle
from canvasrt.containers.logs import configure
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.serve.frontend import FrontEnd, FrontOptions
from canvasrt.containers.serve.output import Output
from canvasrt.containers.serve.prepare import prepare
from canvasrt.containers.serve.profiles import Profile, choose, open_source
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.serve.signals import StopRequest, stop_request
from canvasrt.containers.serve.supervisor import Supervisor
from canvasrt.errors import CanvasError

log = logging.getLogger(__name__)

# Called once everything answers, with the addresses by name.
Ready = Callable[[dict[str, Any]], None]

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run(settings: Settings, ready: Ready, stream: TextIO) -> None:
    """Serves a bundle until a signal comes; `ready` is called with where everything listens.

    `stream` gets the servers' output when it does not go to a file.

    CanvasError when it cannot start or ends by itself.
    """
    configure(settings.python_level, settings.json_logs)
    source = open_source(settings.bundle)
    profile = choose(source, settings.profile)
    tls = settings.tls
    settings = replace(settings, ports=settings.ports.resolve(settings.host))
    with stop_request() as stop, Output(settings, stream) as output:
        with _front(settings, source, profile, tls, output) as front:
            try:
                engines = prepare(source, profile, settings.cache, front.tell, stop.asked)
                if engines is not None:  # else it was told to stop
                    _serve(settings, source, engines, front, output, stop, ready)
            except CanvasError as error:
                if output.is_seen:
                    error.log = ()
                raise


@contextlib.contextmanager
def _front(
    settings: Settings,
    source: Bundle,
    profile: Profile,
    tls: dict[str, str] | None,
    output: Output,
) -> Iterator[FrontEnd]:
    """The front end, which says that it lives while everything else is still to come."""
    options = FrontOptions(
        host=settings.host,
        port=settings.port,
        health_port=settings.health_port,
        names=settings.names,
        keys=settings.keys,
        tls=tls,
        log_level=settings.python_level,
        json_logs=settings.json_logs,
        about=about(source, profile, settings.max_model_len),
    )
    where = Server(Path(), host=settings.host).address
    grpc = f"{where}:{settings.ports.grpc}"
    front = FrontEnd(options, grpc, f"http://{where}:{settings.ports.metrics}/metrics", output.log)
    try:
        front.start()
        log.info("alive: %s/health/live", front.health_url)
        yield front
    finally:
        front.stop(grace=0)


def _serve(
    settings: Settings,
    source: Bundle,
    engines: Path,
    front: FrontEnd,
    output: Output,
    stop: StopRequest,
    ready: Ready,
) -> None:
    with repository_of(source, engines) as repository:
        server = Server(
            repository,
            host=settings.host,
            ports=settings.ports,
            log=output.log,
            exit_timeout=settings.exit_timeout,
            threads=settings.threads,
            max_model_len=settings.max_model_len,
            share_passes=settings.share_passes,
            output=output.descriptor,
            recent=output.recent,
            options=settings.triton_options,
        )
        if settings.keys and settings.host not in LOOPBACK:
            log.warning(
                "the API keys guard the OpenAI API alone: who reaches the ports %d and %d needs none",
                settings.ports.http,
                settings.ports.grpc,
            )
        supervisor = Supervisor(server, front, stop)
        try:
            supervisor.start(settings.ready_timeout)
            if not stop.asked.is_set():
                ready(_addresses(server, front))
            supervisor.watch()
            log.info("stopping; a second signal stops at once")
        finally:
            ended = supervisor.stop(settings.exit_timeout)
    if not ended:
        raise CanvasError(
            f"requests were still running after {settings.exit_timeout} s and were cut off",
            "allow more with --exit-timeout",
        )


def about(source: Bundle, profile: Profile, max_model_len: int | None) -> dict[str, Any]:
    """What `/v1/metadata` says about the model."""
    manifest = source.manifest
    return {
        "digest": manifest.digest,
        "profile": {"id": profile.id, "name": profile.name, "tags": profile.tags},
        "target": profile.target.name,
        "precision": profile.precision,
        "max_context": max_model_len or profile.max_context,
        "canvas_length": manifest.model.canvas_length,
        "made_by": manifest.made_by,
    }


def _addresses(server: Server, front: FrontEnd) -> dict[str, Any]:
    """Where everything listens."""
    host, ports = server.address, server.ports
    data: dict[str, Any] = {
        "openai": front.url,
        "health": front.health_url.removesuffix("/v1"),
        "http": f"{host}:{ports.http}",
        "grpc": f"{host}:{ports.grpc}",
        "metrics": f"http://{host}:{ports.metrics}/metrics",
        "log": str(server.log) if server.log else None,
        "pid": server.pid,
        "front_end_pid": front.pid,
    }
    return data


def decisions(settings: Settings) -> dict[str, Any]:
    """Everything that was decided about a run, without its keys: what a dry run shows."""
    source = open_source(settings.bundle)
    profile = choose(source, settings.profile)
    return {
        "bundle": str(source.path),
        "profile": profile.to_json(),
        "builds_first": profile.builds,
        "host": settings.host,
        "ports": {
            "api": settings.port,
            "health": settings.health_port,
            "triton_http": settings.ports.http,
            "triton_grpc": settings.ports.grpc,
            "metrics": settings.ports.metrics,
        },
        "served_model_names": list(settings.names),
        "max_model_len": settings.max_model_len or profile.max_context,
        "share_passes": settings.share_passes,
        "api_keys": len(settings.keys),
        "tls": settings.ssl_mode,
        "cache": str(settings.cache) if settings.cache else None,
        "log": str(settings.log_file) if settings.log_file else "stderr",
        "log_level": settings.log_level,
    }
