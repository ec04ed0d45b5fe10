"""Many clients for minutes: memory, threads and descriptors of every process stay flat.

python -m tests.faults.soak --clients 64 --seconds 600
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from canvasrt.containers.processes import is_running
from tests.faults import attack
from tests.faults.kills import Clients, processes
from tests.helpers.serving_process import ANY_PORTS, serving

# How much more the last third may hold than the second; the first warms up.
_GROWTH = {"MB": 1.05, "threads": 1.0, "descriptors": 1.0}
_SLACK = {"MB": 8.0, "threads": 4.0, "descriptors": 16.0}


def measure(pid: int) -> dict[str, float]:
    """Return what one process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "MB": int(fields["VmRSS"].split()[0]) / 1024,
        "threads": float(fields["Threads"]),
        "descriptors": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
    }


def run(
    package: Path, folder: Path, clients: int, seconds: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Return each quantity over time, by process, and what was wrong."""
    found: dict[str, list[float]] = defaultdict(list)
    with serving(package, folder, *ANY_PORTS) as running:
        host = attack.host_of(running)
        load = Clients(host, attack.known_answers(host), clients)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert running.process.poll() is None, "the server has ended"
            for name, pid in processes(running).items():
                assert is_running(pid), f"the {name} has ended"
                for what, value in measure(pid).items():
                    found[f"{name}, {what}"].append(value)
            time.sleep(min(2.0, seconds / 30))
        load.stop()
        wrong = list(load.wrong)
        found["right answers"] = [load.right]
        if load.failed:
            wrong.append(f"requests failed: {dict(load.failed)}")
    for name, values in found.items():
        what = name.rpartition(", ")[2]
        if what in _GROWTH:
            third = len(values) // 3
            # Clients that come and go leave peaks; what leaks stays.
            before, after = median(values[third : 2 * third]), median(values[2 * third :])
            if after > before * _GROWTH[what] + _SLACK[what]:
                wrong.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return dict(found), wrong


def main() -> int:
    """Run as a program; return the exit code."""
    given = attack.arguments(__doc__ or "", clients=64, seconds=600)
    with attack.workspace(given.package) as (package, folder):
        found, wrong = run(package, folder, given.clients, given.seconds)
    for name, values in found.items():
        third = len(values) // 3
        shown = [
            max(values[: third or 1]),
            max(values[third : 2 * third] or [0]),
            max(values[2 * third :]),
        ]
        print(f"{name:28}", *(f"{each:10.0f}" for each in shown))
    print(f"{len(wrong):7}  wrong", *wrong[:20], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
