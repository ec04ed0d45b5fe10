"""Builds engines that need their GPU: once, at the first start, into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import canvasrt
from canvasrt import extras
from canvasrt.bundle import MANIFEST, Bundle, load_bundle
from canvasrt.containers.openai.options import ServerPhase
from canvasrt.containers.processes import child_environment, die_with_parent
from canvasrt.containers.serve.build_engines import EngineBuild, report_in
from canvasrt.containers.serve.serving_profiles import ServingProfile
from canvasrt.errors import CanvasError
from canvasrt.progress import Progress, no_progress

log = logging.getLogger(__name__)

Notify = Callable[[ServerPhase, str], None]
_LOOK_EVERY = 0.2
_GRACE = 5.0
_SPARE = 2  # free space, by the size of damaged engines, that lets them be kept


def prepare(
    source: Bundle,
    profile: ServingProfile,
    cache: Path | None,
    notify: Notify,
    stop: threading.Event,
    watch: Callable[[], None] = lambda: None,
) -> Path | None:
    """Return the folder of a serving profile's engines, and build them first if needed; None when `stop`
    was set.

    `cache` is the folder to keep them in; None stands for canvasrt's own. `notify` gets the
    progress; `watch` is called repeatedly while this waits.
    """
    if not profile.builds:
        return profile.path
    out = engines_folder(profile, cache)
    with alone(out, notify, stop, watch):
        if stop.is_set():
            return None
        if not (out / MANIFEST).exists():
            log.info(
                "building the engines of %s for %s; this happens once",
                profile.name,
                profile.target.name,
            )
            _build(profile, out, notify, stop, watch)
            if stop.is_set():
                return None
            log.info("built: %s", out)
    return out


def set_aside_damaged(out: Path, notify: Notify, stop: threading.Event) -> bool:
    """Return whether the engines that `prepare` returned are damaged. If so, rename their folder,
    so that `prepare` builds them again."""
    with alone(out, notify, stop):
        try:
            load_bundle(out, kind="engines")
        except CanvasError as error:
            aside = out.with_name(f"{out.name}.damaged")
            log.warning("the cached engines are damaged: %s; moving them to %s", error, aside)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(out, aside)
            size = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
            if shutil.disk_usage(out.parent).free < _SPARE * size:
                log.warning("deleting %s: the disk has no room for both", aside)
                shutil.rmtree(aside, ignore_errors=True)
            return True
        return False


def engines_folder(profile: ServingProfile, cache: Path | None) -> Path:
    """Return the folder in the cache for a serving profile's engines; its name covers all that determines
    them."""
    from canvasrt.cache import cache_folder

    builder = profile.target.builder
    inputs = {
        "graphs": profile.digest,
        "canvasrt": canvasrt.__version__,
        builder: extras.version(builder),
    }
    text = json.dumps(inputs, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return (cache or cache_folder()) / "profiles" / profile.id / key


@contextlib.contextmanager
def alone(
    out: Path, notify: Notify, stop: threading.Event, watch: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock on one serving profile's engines, since several servers can share a cache."""
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
        while not stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                notify("building", "Another server is building them into the same cache.")
                watch()
                stop.wait(_LOOK_EVERY)
        yield
    finally:
        os.close(lock)


def _build(
    profile: ServingProfile,
    out: Path,
    notify: Notify,
    stop: threading.Event,
    watch: Callable[[], None],
) -> None:
    notify("building", "")
    begun: set[str] = set()

    def progress(what: str, done: int, total: int) -> None:
        if what not in begun:
            begun.add(what)
            log.info("build: %s", what)
            notify("building", f"Now: {what}.")

    job = EngineBuild(
        source=str(profile.path),
        target=profile.target.name,
        out=str(out),
        max_context=profile.max_context,
        max_batch=profile.max_batch,
    )
    what = f"the engines of {profile.name} for {profile.target.name}"
    run_build(job, what, out.parents[2], progress, stop, watch)


def run_build(
    job: EngineBuild,
    what: str,
    cache: Path,
    progress: Progress = no_progress,
    stop: threading.Event | None = None,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Build in a child process, which returns its memory and can be ended; `stop` ends it.

    `cache` is canvasrt's folder for what builds share. CanvasError, which says that `what` cannot
    be built, when the build fails.
    """
    stop = stop or threading.Event()
    process = subprocess.Popen(
        job.command(),
        env={**child_environment(), "CANVASRT_CACHE": str(cache)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    failure: dict[str, str] = {}
    reader = threading.Thread(target=_report, args=(process, failure, progress), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            watch()
            if stop.wait(_LOOK_EVERY):
                process.send_signal(signal.SIGTERM)
                process.wait()
                return
        reader.join(timeout=2)
    finally:
        if process.poll() is None:
            _end(process)
    if process.returncode:
        how = failure.get("error") or f"it ended with exit code {process.returncode}"
        raise CanvasError(
            f"cannot build {what}: {how}",
            failure.get("hint", "see the build's output in the log"),
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Let a build clean up after itself, then kill it."""
    process.terminate()
    try:
        process.wait(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _report(process: subprocess.Popen[str], failure: dict[str, str], progress: Progress) -> None:
    """Pass the build's progress on, log its other lines, and note why it failed."""
    assert process.stdout is not None
    for line in process.stdout:
        report = report_in(line)
        if report is None:
            if line.strip():
                log.info("build: %s", line.strip())
        elif "doing" in report:
            progress(report["doing"], report["done"], report["total"])
        else:
            failure.update(report)
            log.info("build: error: %s", report.get("error"))
