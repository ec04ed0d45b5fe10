"""Runs `canvasrt serve`: chooses the engines, starts, reports the addresses, waits, stops.

Three processes run: this process, which supervises the others; the front end (`frontend.py`); and Triton
(`server.py`), which starts another process for each of its models.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from canvasrt.bundle import Bundle
from canvasrt.containers.logs import configure
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import url_host
from canvasrt.containers.processes import run_name
from canvasrt.containers.serve.build_engines import Wait
from canvasrt.containers.serve.checks import check_machine
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.gpus import gpus_of
from canvasrt.containers.serve.output import ServerOutput
from canvasrt.containers.serve.prepare import prepare, set_aside_damaged
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.serving_profiles import ServingProfile, choose_profile, open_source
from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.serve.supervisor import StopRequest, Supervisor, stop_request
from canvasrt.errors import CanvasError
from canvasrt.runtime.bundle_facts import limited_context

log = logging.getLogger(__name__)

# Called with the addresses, keyed by name, once the server is ready.
Ready = Callable[[dict[str, Any]], None]
_MOST_BYTES = 34  # maximum length, in bytes, of the temporary folder's path
# SHA-256 of the demo checkpoints' tokenizer.json, by which the web page recognizes these checkpoints.
_DEMO_TOKENIZER = "0a6d272284ee7af0c13002879d9d1331901cd2ab8a6826fc6d1aff3be1429ef9"


def run_server(settings: Settings, ready: Ready, stream: TextIO) -> None:
    """Serve a bundle until a signal arrives. The settings must have passed `check_settings`.

    `ready` is called with the addresses. `stream` receives the servers' output, unless the output goes to a file.
    Raises CanvasError if a server exits or cannot start.
    """
    configure(settings.front.log_level, settings.front.json_logs)
    source = open_source(settings.bundle)
    profile = choose_profile(source, settings.profile)
    context = limited_context(profile.max_context, settings.model.max_model_len)
    check_machine(settings)
    about = about_model(source, profile, context)
    settings = replace(settings, front=replace(settings.front, tls=settings.tls, about=about))
    gpus = tuple(gpu.uuid for gpu in gpus_of(settings, profile) if gpu.uuid)
    if settings.ready_timeout is None:
        # The GPUs' models are opened one after another.
        startup = profile.startup + profile.further * max(0, len(gpus) - 1)
        settings = replace(settings, ready_timeout=startup)
    # Reserve Triton's ports now, because Triton only starts to listen on them later.
    with (
        settings.ports.held(settings.triton_host, settings.front.host) as ports,
        stop_request() as stop,
        ServerOutput(settings, stream) as output,
        # The folder of Triton's sockets. Callers reach Triton through the front end, unless a proxy guards Triton.
        tempfile.TemporaryDirectory(prefix=run_name(), dir=_short_folder()) as folder,
    ):
        sockets = None if settings.triton_behind_proxy else Path(folder)
        settings = replace(settings, ports=ports, sockets=sockets)
        # The front end answers health checks before Triton runs.
        front = FrontEnd.over(Server(Path(), settings, output), settings.front)
        try:
            front.start()
            output.note(f"plan: {json.dumps(decisions(settings))}")
            log.info("alive: %s/health/live", front.health_url)
            _serve(settings, source, profile, gpus, front, output, stop, ready)
        except CanvasError as error:
            if output.is_seen:
                error.log = ()
            raise
        finally:
            front.stop(grace=0)


def _short_folder() -> str:
    """Return a folder to create scratch folders in. Its path is short enough for Unix sockets (107 bytes)."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _MOST_BYTES else "/tmp"  # noqa: S108


def _serve(
    settings: Settings,
    source: Bundle,
    profile: ServingProfile,
    gpus: Sequence[str],
    front: FrontEnd,
    output: ServerOutput,
    stop: StopRequest,
    ready: Ready,
) -> None:
    """Prepare the engines and serve them. If engines in the cache are damaged, build them again, once."""
    wait = Wait(stop.requested, lambda detail: front.notify("building", detail), front.check_alive)
    for may_build_again in (profile.builds, False):
        engines = prepare(profile, settings.cache, wait)
        if engines is None:  # a stop was requested
            return
        with repository_of(source, engines) as repository:
            server = Server(repository, settings, output, gpus)
            supervisor = Supervisor(server, front, stop, settings.stall_timeout)
            try:
                supervisor.start()
            except CanvasError:
                if may_build_again and set_aside_damaged(engines, wait):
                    continue
                raise
            _watch(settings, supervisor, stop, ready)
            return


def _watch(settings: Settings, supervisor: Supervisor, stop: StopRequest, ready: Ready) -> None:
    try:
        if not stop.requested.is_set():
            ready(_addresses(supervisor.server, supervisor.front))
        supervisor.watch()
        log.info("stopping; a second signal stops at once")
    finally:
        ended = supervisor.stop(settings.exit_timeout)
    if not ended and stop.forced.is_set():
        raise CanvasError("stopped at once by a second signal; requests in flight were aborted")
    if not ended:
        raise CanvasError(
            f"requests were still running after {settings.exit_timeout} s and were aborted",
            "allow more time with --exit-timeout",
        )


def about_model(source: Bundle, profile: ServingProfile, max_context: int) -> dict[str, Any]:
    """Return the facts about the model for `/v1/metadata` and `/v1/manifest`."""
    manifest = source.manifest
    return {
        "digest": manifest.digest,
        "profile": {"id": profile.id, "name": profile.name, "tags": profile.tags},
        "target": profile.target.name,
        "precision": profile.precision,
        "max_context": max_context,
        "canvas_length": manifest.model.canvas_length,
        "vision": source.takes_images,
        "thinking": source.mentions("enable_thinking"),
        "demo": any(each.get("sha256") == _DEMO_TOKENIZER for each in manifest.files.values()),
        "made_by": manifest.made_by,
        "files": manifest.files,
    }


def _addresses(server: Server, front: FrontEnd) -> dict[str, Any]:
    """Return all addresses, process ids and the log's path."""
    return {
        "openai": front.url,
        "health": front.health_url.removesuffix("/v1"),
        "http": f"{url_host(server.host)}:{server.ports.http}",
        "grpc": f"{url_host(server.host)}:{server.ports.grpc}",
        "metrics": server.metrics_url,
        "log": str(server.log) if server.log else None,
        "pid": server.pid,
        "front_end_pid": front.pid,
    }


def decisions(settings: Settings) -> dict[str, Any]:
    """Return the result of a dry run: all decisions about a run, without API keys."""
    source = open_source(settings.bundle)
    profile = choose_profile(source, settings.profile)
    context = limited_context(profile.max_context, settings.model.max_model_len)
    return {
        "bundle": str(source.path),
        "profile": profile.to_json(),
        "builds_first": profile.builds,
        "gpus": [gpu.to_json() for gpu in gpus_of(settings, profile)],
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
        "max_model_len": context,
        "api_keys": len(settings.front.keys),
        "tls": settings.ssl_mode or "disabled",
        "cache": str(settings.cache) if settings.cache else None,
        "log": str(settings.log_file) if settings.log_file else "stderr",
        "log_level": settings.front.log_level,
    }
