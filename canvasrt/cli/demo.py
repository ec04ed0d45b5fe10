"""`canvasrt demo`: every step on this machine, from the demo checkpoint to served answers."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from canvasrt.cli.options import AsJson, option
from canvasrt.console import emit, progress, table
from canvasrt.errors import CanvasError
from canvasrt.progress import report
from canvasrt.types import Json

if TYPE_CHECKING:
    from canvasrt.containers.client.openai import OpenAIClient
    from canvasrt.containers.serve.server import Server

DEMO_PROMPTS = (
    "12+34=",
    "31-75=",
    "reverse planet",
    "upper hello",
    "sort 40172",
    "count 7 to 10",
    "shuffle abdeg",
    "brackets 8 ([",
)
# Closed question → its options, of which the first is right.
DECISIONS = {
    "12+34=": ("46", "45", "56"),
    "reverse planet": ("tenalp", "planet", "natpel"),
    "sort 40172": ("01247", "40172", "74210"),
}
# Asks for a number, because the demo model was not trained on JSON objects.
SUM_SCHEMA = {"type": "integer", "minimum": 0, "maximum": 99}
# A tiny model may miss one or two questions. More misses mean that something is broken.
MAY_MISS = 2
DEMO_SEED = 0

Keep = Annotated[
    Path | None,
    option("--keep", "DIR", "Keep the engines and the package in this folder."),
]


def demo(keep: Keep = None, as_json: AsJson = False) -> None:
    """Build, package and serve the demo checkpoint, ask it questions, and stop."""
    from canvasrt.containers.client.openai import OpenAIClient
    from canvasrt.containers.openai.options import FrontOptions
    from canvasrt.containers.package.package import package, repository_of
    from canvasrt.containers.ports import Ports
    from canvasrt.containers.serve.frontend import FrontEnd
    from canvasrt.containers.serve.server import Server
    from canvasrt.containers.serve.settings import Settings
    from canvasrt.pipeline import build_bundle

    started = time.perf_counter()
    made_here = partial(tempfile.TemporaryDirectory, prefix="canvasrt-demo-")
    with contextlib.nullcontext(keep) if keep else made_here() as place, progress():
        folder = Path(place)
        build_bundle("demo", "cpu", folder / "engines")
        built = time.perf_counter()
        report("packaging")
        made = package(folder / "engines", folder / "package")
        report("starting tritonserver")
        log = folder / "triton.log"
        with (
            repository_of(made) as repository,
            Server(repository, Settings(ports=Ports(0, 0, 0), log=str(log))) as server,
            FrontEnd.over(server, FrontOptions(port=0)) as front,
        ):
            ready = time.perf_counter()
            report("asking")
            client = OpenAIClient(front.url)
            rows = _ask_all(server, client)
            decisions = [_decide(client, *each) for each in DECISIONS.items()]
            follows = _ask_for_json(client)
        stopped = time.perf_counter()
    data = {
        "rows": rows,
        "decisions": decisions,
        "json": follows,
        "right": sum(row["right"] for row in rows),
        "seconds": {
            "build": built - started,
            "package_and_start": ready - built,
            "total": stopped - started,
        },
    }
    emit(data, lambda console: _render(console, data))
    judge(rows)


def _ask_all(server: Server, openai: OpenAIClient) -> list[Json]:
    """Ask every question over every protocol. Return each question's answers, and each answer's milliseconds."""
    from canvasrt.containers.client.triton import Client
    from canvasrt.demo.tasks import is_correct

    with (
        Client(f"{server.address}:{server.ports.http}", "http") as http,
        Client(f"{server.address}:{server.ports.grpc}", "grpc") as grpc,
    ):
        for ask in (http.infer, grpc.infer, openai.ask):
            ask({"prompt": DEMO_PROMPTS[0]})  # the first call allocates buffers
        rows = []
        for question in DEMO_PROMPTS:
            inputs = {"prompt": question, "seed": DEMO_SEED}
            by_http, http_ms = _timed(http.infer, inputs)
            by_grpc, grpc_ms = _timed(grpc.infer, inputs)
            by_openai, openai_ms = _timed(openai.ask, inputs)
            rows.append(
                {
                    "question": question,
                    "http": by_http.text,
                    "grpc": by_grpc.text,
                    "openai": by_openai["text"],
                    "right": is_correct(question, by_http.text),
                    "steps": by_http.steps,
                    "http_ms": http_ms,
                    "grpc_ms": grpc_ms,
                    "openai_ms": openai_ms,
                }
            )
    return rows


def _decide(client: OpenAIClient, question: str, options: Sequence[str]) -> Json:
    """Ask a closed question. Return the answer, its probability, and how many milliseconds it took."""
    closed = {
        "type": "choice",
        "instructions": "Which one is right?",
        "choices": [{"value": each} for each in options],
    }
    body = {"model": client.model, "input": question, "layout": "bare", "questions": [closed]}
    reply, ms = _timed(lambda given: client.post("decisions", given), body)
    (answer,) = reply["answers"]
    return {
        "question": question,
        "choice": answer["choice"],
        "probability": answer["confidence"],
        "right": answer["choice"] == options[0],
        "ms": ms,
    }


def _ask_for_json(client: OpenAIClient) -> Json:
    """Ask for an answer that follows `SUM_SCHEMA`. Return the answer, and how many milliseconds it took."""
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM_SCHEMA}}
    body = {
        "model": client.model,
        "messages": [{"role": "user", "content": DEMO_PROMPTS[0]}],
        "response_format": wanted,
        "seed": DEMO_SEED,
    }
    reply, ms = _timed(lambda given: client.post("chat/completions", given), body)
    return {"answer": str(reply["choices"][0]["message"]["content"]), "ms": ms}


def _timed(ask: Callable[[Json], Any], inputs: Json) -> tuple[Any, float]:
    before = time.perf_counter()
    answer = ask(inputs)
    return answer, (time.perf_counter() - before) * 1000


def _render(console: Any, data: Json) -> None:
    columns = ("question", "HTTP", "gRPC", "OpenAI", "right", "steps per block", "ms, each")
    rows = [
        (
            *(row[key] for key in ("question", "http", "grpc", "openai")),
            _yes(row["right"]),
            " ".join(map(str, row["steps"])),
            " ".join(f"{row[key]:.0f}" for key in ("http_ms", "grpc_ms", "openai_ms")),
        )
        for row in data["rows"]
    ]
    console.print(table(columns, rows))
    closed = [
        (
            each["question"],
            each["choice"],
            f"{each['probability']:.4f}",
            _yes(each["right"]),
            f"{each['ms']:.0f}",
        )
        for each in data["decisions"]
    ]
    console.print(table(("decision", "answer", "probability", "right", "ms"), closed))
    follows, seconds = data["json"], data["seconds"]
    schema = [(f"integer: {DEMO_PROMPTS[0]}", follows["answer"], f"{follows['ms']:.0f}")]
    console.print(table(("JSON schema", "answer", "ms"), schema))
    console.print(
        f"{data['right']} of {len(rows)} right; built in {seconds['build']:.0f} s, serving"
        f" {seconds['package_and_start']:.0f} s later, {seconds['total']:.0f} s in total"
    )


def _yes(right: bool) -> str:
    return "yes" if right else "no"


def judge(rows: Sequence[Json]) -> None:
    """Raise CanvasError if answers differ between protocols, or if more than MAY_MISS answers are wrong."""
    for row in rows:
        if not row["http"] == row["grpc"] == row["openai"]:
            raise CanvasError(
                f"{row['question']!r} got {row['http']!r} over HTTP, {row['grpc']!r} over gRPC and"
                f" {row['openai']!r} over the OpenAI API",
                "the same seed must give the same answer: this is a bug in canvasrt",
            )
    wrong = [row["question"] for row in rows if not row["right"]]
    if len(wrong) > MAY_MISS:
        raise CanvasError(
            f"{len(wrong)} of {len(rows)} answers are wrong: {', '.join(wrong)}",
            "the demo checkpoint should answer nearly all correctly: run `canvasrt doctor`",
        )
