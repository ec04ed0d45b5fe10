"""Builds engines in a process of its own: its memory returns to the system, and its crash is not the server's.

The job is a JSON object in the first argument. Lines of output that are JSON objects report:
`{"doing": WHAT, "done": N, "total": M}` per percent of each kind of work, and at the end
`{"error": MESSAGE, "hint": HINT}` if it failed. Other lines are the builder's log.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any

from canvasrt.defaults import MAX_BATCH
from canvasrt.errors import CanvasError
from canvasrt.staging import raise_exit, system_error

_MODULE = "canvasrt.containers.serve.build_engines"


@dataclass(frozen=True)
class EngineBuild:
    """What to build: arguments of `pipeline.build`, and two of its options.

    memory: the bytes that serving may take here; None if that is checked elsewhere.
    """

    source: str
    target: str
    out: str
    max_context: int | None = None
    max_batch: int = MAX_BATCH
    memory: int | None = None

    def command(self) -> list[str]:
        """Return the command that builds it."""
        return [sys.executable, "-m", _MODULE, json.dumps(asdict(self))]


def report_in(line: str) -> dict[str, Any] | None:
    """Return the report that a line of output holds; None for another line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def main() -> int:
    """Build the job in the first argument, and return the exit code."""
    from canvasrt.build.checks import check_memory_to_serve
    from canvasrt.build.plan import BuildOptions
    from canvasrt.pipeline import build_all, plan_all
    from canvasrt.targets import find_target

    signal.signal(signal.SIGTERM, raise_exit)
    job = EngineBuild(**json.loads(sys.argv[1]))
    percents: dict[str, int] = {}

    def progress(what: str, done: int, total: int) -> None:
        # Several kinds of work may run side by side and report in turn.
        percent = 100 * done // max(total, 1)
        if percents.get(what) != percent:
            percents[what] = percent
            _say({"doing": what, "done": done, "total": total})

    try:
        options = BuildOptions(max_context=job.max_context, max_batch=job.max_batch)
        plans = plan_all(job.source, [find_target(job.target)], job.out, options, progress)
        if job.memory is not None:
            check_memory_to_serve(plans[0], job.memory)
        build_all(plans, progress)
    except Exception as error:
        found = error if isinstance(error, CanvasError) else system_error(error)
        if found is None:
            raise
        _say({"error": found.message, "hint": found.hint})
        return found.exit_code
    return 0


def _say(report: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(report)}\n")  # in one piece, since threads report
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
