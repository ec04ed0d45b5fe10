"""Compares `canvasrt batch` in this process with 64 concurrent requests over HTTP, for the same questions.

The clients over HTTP are `canvasrt batch --url`, which takes less CPU than a client library. The time to start the
server does not count. The time to open the engines in this process does.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from bench import results
from bench.serving import CLIENTS, family, usage
from canvasrt.bundle import load_bundle
from canvasrt.containers.batch.local import Local
from canvasrt.containers.batch.run import run_batch
from canvasrt.containers.batch.servers import Servers
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import CanvasError
from canvasrt.types import Json

# Answers all questions of the first file into the second.
Way = Callable[[Path, Path], object]


def measure(bundle: Path, prompts: int = 10_000, rounds: int = 4, out: results.Out = None) -> None:
    """Answer the same questions both ways, in `rounds` alternating portions, and compare the files."""
    opened = load_bundle(bundle, kind="engines", check=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repository = stack.enter_context(repository_of(opened))
        settings = Settings(ports=Ports(0, 0, 0), log=os.devnull)
        server = stack.enter_context(Server(repository, settings))
        options = FrontOptions(
            port=0, log_level="WARNING", about={"digest": opened.manifest.digest}
        )
        front = stack.enter_context(FrontEnd.over(server, options))

        def in_process(file: Path, answers: Path) -> None:
            local = Local(opened.path)
            run_batch(file, answers, 0, "bundle", local, CLIENTS)

        def over_http(file: Path, answers: Path) -> None:
            servers = Servers([front.url], "", ANSWER_TIMEOUT)
            run_batch(file, answers, 0, "servers", servers, CLIENTS)

        ways: dict[str, Way] = {"in process": in_process, f"{CLIENTS} over HTTP": over_http}
        pids = [os.getpid(), *family(server.pid), *family(front.pid or 0)]
        rows = [
            row
            for number in range(rounds)
            for row in _round(ways, pids, folder, prompts // rounds, number)
        ]
    results.report({"rounds": rows, "both ways": _both(rows)}, out)


def _round(
    ways: Mapping[str, Way], pids: list[int], folder: Path, count: int, number: int
) -> list[Json]:
    """Return each way's seconds, and its CPU milliseconds per answer, clients included."""
    file = folder / f"{number}.jsonl"
    file.write_text("".join(map(_question, range(number * count, (number + 1) * count))))
    rows, files = [], []
    for way in list(ways) if number % 2 else list(reversed(ways)):
        answers = folder / f"{number} {way}.jsonl"
        before, begin = usage(), time.perf_counter()
        ways[way](file, answers)
        seconds, after = time.perf_counter() - begin, usage()
        spent = sum(after[pid] - before[pid] for pid in pids)
        files.append(answers.read_bytes())
        rows.append(
            {"way": way, "answers": count, "seconds": seconds, "CPU ms": 1e3 * spent / count}
        )
    if files[0] != files[1]:
        raise CanvasError("the two ways gave different files", f"compare the files in {folder}")
    return rows


def _question(number: int) -> str:
    word = "".join(random.Random(number).sample("abcdefghijklmnopqrstuvwxyz", 8))
    messages = [{"role": "user", "content": f"reverse {word}"}]
    body = {"model": "canvasrt", "messages": messages}
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line) + "\n"


def _both(rows: list[Json]) -> list[Json]:
    """Return answers per second and CPU time per answer over all rounds, and their ratios. On a machine whose cores are
    all busy, the ratio of CPU times is also the ratio of throughputs."""
    found = []
    for way in sorted({row["way"] for row in rows}, reverse=True):
        own = [row for row in rows if row["way"] == way]
        rate = sum(row["answers"] for row in own) / sum(row["seconds"] for row in own)
        spent = sum(row["CPU ms"] for row in own) / len(own)
        found.append({"way": way, "answers per second": rate, "CPU ms per answer": spent})
    local, remote = found
    names = ("answers per second", "CPU ms per answer")
    return [*found, {"way": "ratio"} | {name: local[name] / remote[name] for name in names}]
