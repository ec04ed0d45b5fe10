"""Runs `canvasrt serve`: chooses the engines, starts, reports the addresses, waits, stops."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from canvasrt.bundle import Bundle
from canvasrt.containers.logs import configure
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.serve.checks import check_machine
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.output import ServerOutput
from canvasrt.containers.serve.prepare import prepare, set_aside_damaged
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.serving_profiles import ServingProfile, choose_profile, open_source
from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.serve.signals import StopRequest, stop_request
from canvasrt.containers.serve.supervisor import Supervisor
from canvasrt.errors import CanvasError

log = logging.getLogger(__name__)

# Called with the addresses by name, once everything answers.
Ready = Callable[[dict[str, Any]], None]


def run_server(settings: Settings, ready: Ready, stream: TextIO) -> None:
    """Serve a bundle until a signal comes. `check_settings` has seen the settings.

    `ready` gets the addresses. `stream` gets the servers' output unless that goes to a file.

    CanvasError when a server cannot start, or ends by itself.
    """
    configure(settings.front.log_level, settings.front.json_logs)
    source = open_source(settings.bundle)
    profile = choose_profile(source, settings.profile)
    check_machine(settings)
    settings = replace(
        settings,
        ports=settings.ports.with_free_ones(settings.triton_host, settings.front.host),
        front=replace(
            settings.front,
            tls=settings.tls,
            about=about(source, profile, settings.model.max_model_len),
        ),
    )
    with stop_request() as stop, ServerOutput(settings, stream) as output:
        with _front(settings, output) as front:
            try:
                _serve(settings, source, profile, front, output, stop, ready)
            except CanvasError as error:
                if output.is_seen:
                    error.log = ()
                raise


@contextlib.contextmanager
def _front(settings: Settings, output: ServerOutput) -> Iterator[FrontEnd]:
    """Run the front end, which answers health checks while Triton is not running yet."""
    triton = _triton(settings, Path(), output)
    grpc = f"{triton.address}:{settings.ports.grpc}"
    front = FrontEnd(settings.front, grpc, triton.metrics_url, output.log, triton.request_timeout)
    try:
        front.start()
        log.info("alive: %s/health/live", front.health_url)
        yield front
    finally:
        front.stop(grace=0)


def _serve(
    settings: Settings,
    source: Bundle,
    profile: ServingProfile,
    front: FrontEnd,
    output: ServerOutput,
    stop: StopRequest,
    ready: Ready,
) -> None:
    """Prepare the engines and serve them. Damaged ones in the cache are built again, once."""
    for mend in (profile.builds, False):
        engines = prepare(
            source, profile, settings.cache, front.notify, stop.requested, front.check_alive
        )
        if engines is None:  # a stop was requested
            return
        with repository_of(source, engines) as repository:
            supervisor = _supervisor(settings, repository, front, output, stop)
            try:
                supervisor.start(settings.ready_timeout)
            except CanvasError:
                if mend and set_aside_damaged(engines, front.notify, stop.requested):
                    continue
                raise
            _watch(settings, supervisor, stop, ready)
            return


def _supervisor(
    settings: Settings, repository: Path, front: FrontEnd, output: ServerOutput, stop: StopRequest
) -> Supervisor:
    return Supervisor(_triton(settings, repository, output), front, stop, settings.stall_timeout)


def _triton(settings: Settings, repository: Path, output: ServerOutput) -> Server:
    return Server(
        repository,
        host=settings.triton_host,
        metrics_host=settings.front.host,
        ports=settings.ports,
        log=output.log,
        exit_timeout=settings.exit_timeout,
        model=settings.model,
        output=output.descriptor,
        recent=output.recent,
        options=settings.triton_options,
    )


def _watch(settings: Settings, supervisor: Supervisor, stop: StopRequest, ready: Ready) -> None:
    try:
        if not stop.requested.is_set():
            ready(_addresses(supervisor.server, supervisor.front))
        supervisor.watch()
        log.info("stopping; a second signal stops at once")
    finally:
        ended = supervisor.stop(settings.exit_timeout)
    if not ended:
        raise CanvasError(
            f"requests were still running after {settings.exit_timeout} s and were aborted",
            "allow more time with --exit-timeout",
        )


def about(source: Bundle, profile: ServingProfile, max_model_len: int | None) -> dict[str, Any]:
    """Return what `/v1/metadata` says about the model."""
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
    """Return the addresses of everything that listens."""
    host, ports = server.address, server.ports
    data: dict[str, Any] = {
        "openai": front.url,
        "health": front.health_url.removesuffix("/v1"),
        "http": f"{host}:{ports.http}",
        "grpc": f"{host}:{ports.grpc}",
        "metrics": server.metrics_url,
        "log": str(server.log) if server.log else None,
        "pid": server.pid,
        "front_end_pid": front.pid,
    }
    return data


def decisions(settings: Settings) -> dict[str, Any]:
    """Return what a dry run shows: all decisions about a run, without its keys."""
    source = open_source(settings.bundle)
    profile = choose_profile(source, settings.profile)
    return {
        "bundle": str(source.path),
        "profile": profile.to_json(),
        "builds_first": profile.builds,
        "host": settings.front.host,
        "triton_host": settings.triton_host,
        "ports": {
            "api": settings.front.port,
            "health": settings.front.health_port,
            "triton_http": settings.ports.http,
            "triton_grpc": settings.ports.grpc,
            "metrics": settings.ports.metrics,
        },
        "served_model_names": list(settings.front.names),
        **asdict(settings.model),
        "max_model_len": settings.model.max_model_len or profile.max_context,
        "api_keys": len(settings.front.keys),
        "tls": settings.ssl_mode or "disabled",
        "cache": str(settings.cache) if settings.cache else None,
        "log": str(settings.log_file) if settings.log_file else "stderr",
        "log_level": settings.front.log_level,
    }
