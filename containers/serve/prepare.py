"""Builds engines at the first start, into a cache that several servers can share."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import canvasrt
from canvasrt import extras
from canvasrt.bundle import MANIFEST, load_bundle
from canvasrt.cache import cache_folder, key_of
from canvasrt.containers.serve.build_engines import EngineBuild, Wait, run_build
from canvasrt.containers.serve.serving_profiles import ServingProfile
from canvasrt.errors import CanvasError
from canvasrt.machine import building_gpu
from canvasrt.progress import listening
from canvasrt.staging import NO_LOCKS
from canvasrt.targets import Target

log = logging.getLogger(__name__)

_SPARE = 2  # keep damaged engines if the free space is at least this multiple of their size


def prepare(profile: ServingProfile, cache: Path | None, wait: Wait) -> Path | None:
    """Return the folder of a serving profile's engines. Builds them first if needed. Returns None if a stop was
    requested.

    cache: the cache's folder; None is canvasrt's default.
    """
    if not profile.builds:
        return profile.path
    out = engines_folder(profile, cache)
    build_once(out, wait, lambda: _build(profile, out, wait))
    return None if wait.stop.is_set() else out


def build_once(out: Path, wait: Wait, build: Callable[[], None]) -> None:
    """Call `build` unless the cache's folder `out` holds engines, or a stop is requested."""
    if (out / MANIFEST).exists():  # without the lock: a shared cache can be read-only
        return
    with alone(out, wait):
        if not wait.stop.is_set() and not (out / MANIFEST).exists():
            build()


def _build(profile: ServingProfile, out: Path, wait: Wait) -> None:
    log.info(
        "building the engines of %s for %s; this happens once", profile.name, profile.target.name
    )
    wait.notify("")
    begun: set[str] = set()

    def progress(what: str, done: int, total: int) -> None:
        if what not in begun:
            begun.add(what)
            log.info("build: %s", what)
            wait.notify(f"Now: {what}.")

    job = EngineBuild(
        source=str(profile.path),
        target=profile.target.name,
        out=str(out),
        max_context=profile.max_context,
        max_batch=profile.max_batch,
    )
    what = f"the engines of {profile.name} for {profile.target.name}"
    with listening(progress):
        run_build(job, what, out.parents[2], wait)
    if not wait.stop.is_set():
        log.info("built: %s", out)


def set_aside_damaged(out: Path, wait: Wait) -> bool:
    """Return whether the engines that `prepare` returned are damaged. If so, move them aside, so that `prepare` builds
    them again."""
    # Check without the lock first, because a read-only cache cannot have a lock.
    with contextlib.suppress(CanvasError):
        load_bundle(out, kind="engines")
        return False
    with alone(out, wait):
        try:
            load_bundle(out, kind="engines")
        except CanvasError as error:
            aside = out.with_name(f"{out.name}.damaged")
            log.warning("the cached engines are damaged: %s; moving them to %s", error, aside)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(out, aside)
            size = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
            if shutil.disk_usage(out.parent).free < _SPARE * size:
                log.warning("deleting %s: the disk has no room for it and the new engines", aside)
                shutil.rmtree(aside, ignore_errors=True)
            return True
        return False


def engines_folder(profile: ServingProfile, cache: Path | None) -> Path:
    """Return the cache's folder for a serving profile's engines. Its name is a hash of all that determines the
    engines."""
    inputs = {"graphs": profile.digest, **versions_for(profile.target)}
    return (cache or cache_folder()) / "profiles" / profile.id / key_of(inputs)[:16]


def versions_for(target: Target) -> dict[str, Any]:
    """Return what determines engines, apart from their source: the versions of canvasrt and of the builder, and the
    kind of GPU on which they are built."""
    versions = {"canvasrt": canvasrt.__version__, target.builder: extras.version(target.builder)}
    if gpu := building_gpu(target):
        versions["gpu"] = gpu.name
    return versions


@contextlib.contextmanager
def alone(out: Path, wait: Wait) -> Iterator[None]:
    """Hold the lock of an engines folder, since several servers can share a cache. If a stop is requested, continue
    without the lock."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(out.parent / f"{out.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CanvasError(
            f"the cache {out.parent} cannot be written to: {error.strerror}",
            "mount a volume there that this user can write to, or give another folder with --cache"
            " or NIM_CACHE_PATH",
        ) from error
    try:
        told = False
        while not wait.stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    wait.notify("Another server is building the engines into the same cache.")
                told = True
                wait.look()
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                break
        yield
    finally:
        os.close(lock)
