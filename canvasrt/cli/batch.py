"""`canvasrt batch`: answers a file of requests, in this process or through servers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt.cli.options import AsJson, Threads, argument, option, refuse
from canvasrt.cli.prompt import AnswerTimeout
from canvasrt.console import duration, emit, progress
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import CanvasError, UsageError

Questions = Annotated[
    Path,
    argument("QUESTIONS.jsonl", "Requests in the form of OpenAI's Batch API, one per line."),
]
Answers = Annotated[
    Path,
    option(
        "-o, --out",
        "ANSWERS.jsonl",
        "The file for the answers. Errors go to ANSWERS.errors.jsonl; ANSWERS.jsonl.partial keeps unfinished work.",
    ),
]
BundleDir = Annotated[
    Path | None,
    option("--bundle", "DIR", "Engines or graphs to run in this process, instead of a server."),
]
Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        show_default="this machine, port 8000",
        help="An OpenAI-compatible server; may be given several times.",
    ),
]
Ray = Annotated[
    str | None,
    option("--ray", "HOST:PORT", "With --bundle: run on every machine or GPU of this Ray cluster."),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        help="A request without a seed gets one derived from this number and its custom_id.",
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency",
        metavar="N",
        min=1,
        help="Maximum number of requests at a time.",
    ),
]


def batch(
    context: typer.Context,
    questions: Questions,
    out: Answers,
    bundle: BundleDir = None,
    url: Urls = None,
    ray: Ray = None,
    seed: Seed = 0,
    concurrency: Concurrency = 64,
    timeout: AnswerTimeout = ANSWER_TIMEOUT,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests. After an interruption, the same command resumes.

    Example: canvasrt batch questions.jsonl --bundle engines -o answers.jsonl
    """
    from canvasrt.containers.batch.run import run_batch

    if bundle is not None:
        if url:
            raise UsageError("--bundle and --url cannot be combined", "give one of them")
        refuse(context, ("timeout",), "has no effect with --bundle", "leave it out")
        answerer = _of_bundle(bundle, threads, ray)
        source = answerer.digest
    else:
        refuse(context, ("threads",), "has no effect on servers", "leave it out")
        refuse(context, ("ray",), "needs --bundle", "add --bundle DIR")
        from canvasrt.containers.batch.servers import Servers
        from canvasrt.containers.client.openai import KEY_VARIABLE

        key = os.environ.get(KEY_VARIABLE, "")
        answerer, source = Servers(url or ["127.0.0.1"], key, timeout), "servers"
    begin = time.monotonic()
    with progress(rate=True):
        done = run_batch(questions, out, seed, source, answerer, concurrency)
    seconds = time.monotonic() - begin
    data = {"answers": done.answers, "errors": done.errors, "seconds": round(seconds, 3)}
    text = f"{done.answers} answers in {out}, {duration(seconds)}"
    emit(data, lambda shown: shown.print(text))
    if done.errors:
        raise CanvasError(
            f"{done.errors} of {done.answers + done.errors} requests failed",
            f"see {done.outputs.errors}",
        )


def _of_bundle(bundle: Path, threads: int | None, ray: str | None) -> Any:
    from canvasrt.extras import require

    require("fastapi", "serve")
    if ray is not None:
        from canvasrt.containers.batch.cluster import Cluster

        return Cluster(ray, bundle, threads)
    from canvasrt.containers.batch.local import Local

    return Local(bundle, threads)
