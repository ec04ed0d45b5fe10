"""Builds engines in a child process, so that a build's memory is returned to the system, and a crash does not end the
server.

The process gets a job as JSON in its first argument. It writes reports as lines of JSON: `{"doing": WHAT, "done": N,
"total": M}` at every percent of progress, and `{"error": MESSAGE, "hint": HINT}` if the build fails. All other lines of
its output are the builder's log.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from canvasrt.containers.processes import child_environment, die_with_parent
from canvasrt.defaults import MAX_BATCH
from canvasrt.errors import CanvasError
from canvasrt.progress import Progress, listener
from canvasrt.staging import raise_exit, system_error

log = logging.getLogger(__name__)

_MODULE = "canvasrt.containers.serve.build_engines"
LOOK_EVERY = 0.2
_GRACE = 5.0  # seconds for a stopped build to clean up


@dataclass(frozen=True)
class EngineBuild:
    """The job of a build: arguments and two options of `pipeline.plan_all`, and `memory`.

    memory: bytes that serving can use here; if serving would need more, the build fails. None skips this check.
    """

    source: str
    target: str
    out: str
    max_context: int | None = None
    max_batch: int = MAX_BATCH
    memory: int | None = None

    def command(self) -> list[str]:
        """Return the command that runs the job."""
        return [sys.executable, "-m", _MODULE, json.dumps(asdict(self))]


@dataclass(frozen=True)
class Wait:
    """Says how to wait for engines. `stop` ends the wait. `notify` is called with a line about the reason to wait.
    `meanwhile` is called repeatedly."""

    stop: threading.Event = field(default_factory=threading.Event)
    notify: Callable[[str], None] = lambda detail: None
    meanwhile: Callable[[], None] = lambda: None

    def look(self) -> bool:
        """Wait for a moment; return whether to stop."""
        self.meanwhile()
        return self.stop.wait(LOOK_EVERY)


def run_build(job: EngineBuild, what: str, cache: Path, wait: Wait) -> None:
    """Build in a child process, until it is done or a stop is requested.

    `cache` is canvasrt's cache folder. If the build fails, raises CanvasError, which says that `what` cannot be built.
    """
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
    reader = threading.Thread(target=_follow, args=(process, failure, listener()), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            if wait.look():
                process.send_signal(signal.SIGTERM)
                process.wait()
                return
        reader.join(timeout=2)
    finally:
        if process.poll() is None:
            _end(process)
    if process.returncode:
        how = failure.get("error") or f"it ended with exit code {process.returncode}"
        hint = failure.get("hint", "see the build's output in the log")
        raise CanvasError(f"cannot build {what}: {how}", hint)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _follow(process: subprocess.Popen[str], failure: dict[str, str], progress: Progress) -> None:
    """Report the build's progress, log its other output, and record why it failed."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        if not isinstance(report, dict):
            if line.strip():
                log.info("build: %s", line.strip())
        elif "doing" in report:
            progress(report["doing"], report["done"], report["total"])
        else:
            failure.update(report)
            log.info("build: error: %s", report.get("error"))


def main() -> int:
    """Run the job in the first argument, and return the exit code."""
    from canvasrt.build.checks import check_memory_to_serve
    from canvasrt.build.options import BuildOptions
    from canvasrt.pipeline import build_all, plan_all
    from canvasrt.progress import listening
    from canvasrt.targets import find_target

    signal.signal(signal.SIGTERM, raise_exit)
    job = EngineBuild(**json.loads(sys.argv[1]))
    percents: dict[str, int] = {}

    def progress(what: str, done: int, total: int) -> None:
        # Keyed by `what`, because several tasks can run concurrently.
        percent = 100 * done // max(total, 1)
        if percents.get(what) != percent:
            percents[what] = percent
            _say({"doing": what, "done": done, "total": total})

    try:
        options = BuildOptions(max_context=job.max_context, max_batch=job.max_batch)
        with listening(progress):
            plans = plan_all(job.source, [find_target(job.target)], job.out, options)
            if job.memory is not None:
                check_memory_to_serve(plans[0], job.memory)
            build_all(plans)
    except Exception as error:
        found = error if isinstance(error, CanvasError) else system_error(error)
        if found is None:
            raise
        _say({"error": found.message, "hint": found.hint})
        return found.exit_code
    return 0


def _say(report: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(report)}\n")  # one write per line, since several threads report
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
