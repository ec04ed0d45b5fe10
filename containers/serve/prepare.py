"""Engines that must be built on their GPU: built once, at the first start, into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import canvasrt
from canvasrt import extras
from canvasrt.bundle import MANIFEST, Bundle
from canvasrt.containers.openai.state import Phase
from canvasrt.containers.processes import die_with_parent
from canvasrt.containers.serve.profiles import Profile
from canvasrt.errors import CanvasError

log = logging.getLogger(__name__)

Tell = Callable[[Phase, str], None]
_LOOK_EVERY = 0.2
_LAST_LINES = 20


def prepare(
    source: Bundle, profile: Profile, cache: Path | None, tell: Tell, stop: threading.Event
) -> Path | None:
    """The folder of the profile's engines, built first where they must be; None when `stop` was set.

    `cache` is the folder to keep them in; None takes canvasrt's own. `tell` hears of the progress.
    """
    if not profile.builds:
        return profile.path
    out = engines_folder(profile, cache)
    with _alone(out, tell, stop):
        if stop.is_set():
            return None
        if not (out / MANIFEST).exists():
            log.info("building engines of %s for %s, once", profile.name, profile.target.name)
            _build(profile, out, tell, stop)
            if stop.is_set():
                return None
            log.info("built: %s", out)
    return out


def engines_folder(profile: Profile, cache: Path | None) -> Path:
    """Where the engines of a profile are kept, by all that decides them."""
    from canvasrt.cache import cache_folder

    builder = profile.target.builder
    decided = {
        "graphs": profile.digest,
        "canvasrt": canvasrt.__version__,
        builder: extras.version(builder),
    }
    text = json.dumps(decided, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return (cache or cache_folder()) / "profiles" / profile.id / key


@contextlib.contextmanager
def _alone(out: Path, tell: Tell, stop: threading.Event) -> Iterator[None]:
    """Holds the lock on one profile's engines: several servers can share a cache."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(out.parent / f"{out.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CanvasError(
            f"the cache {out.parent} cannot be written to: {error.strerror}",
            "mount a volume there that this user can write to, or name another folder with --cache"
            " or NIM_CACHE_PATH",
        ) from error
    try:
        while not stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell("building", "Another server builds them into the same cache.")
                stop.wait(_LOOK_EVERY)
        yield
    finally:
        os.close(lock)


def _build(profile: Profile, out: Path, tell: Tell, stop: threading.Event) -> None:
    """Runs `canvasrt build` as a process of its own, which gives its memory back and can be ended."""
    tell("building", "")
    command = [sys.executable, "-m", "canvasrt", "build", str(profile.path)]
    command += ["--target", profile.target.name, "-o", str(out)]
    command += ["--max-context", str(profile.max_context), "--max-batch", str(profile.max_batch)]
    cache = out.parents[2]
    process = subprocess.Popen(
        command,
        env={**os.environ, "CANVASRT_CACHE": str(cache)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    said: list[str] = []
    reader = threading.Thread(target=_report, args=(process, said, tell), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            if stop.wait(_LOOK_EVERY):
                process.send_signal(signal.SIGTERM)
                process.wait()
                return
        reader.join(timeout=2)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise _failure(profile, said, process.returncode)


def _report(process: subprocess.Popen[str], said: list[str], tell: Tell) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        text = line.strip()
        if text:
            said.append(text)
            log.info("build: %s", text)
            tell("building", f"Now: {text}.")


def _failure(profile: Profile, said: list[str], code: int) -> CanvasError:
    """The build's own error, as it said it."""
    last = {line.partition(": ")[0]: line.partition(": ")[2] for line in said[-_LAST_LINES:]}
    how = last.get("error") or f"it ended with exit code {code}"
    return CanvasError(
        f"the engines of {profile.name} for {profile.target.name} could not be built: {how}",
        last.get("hint", "the log has what the build said"),
    )
