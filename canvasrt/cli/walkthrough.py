"""The demo: builds the demo checkpoint for the CPU, packages and serves it, and checks its
answers."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from canvasrt.console import emit, progress, table
from canvasrt.containers.client.openai import OpenAIClient
from canvasrt.containers.client.triton import Client
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import package, repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.demo.tasks import is_correct
from canvasrt.errors import CanvasError
from canvasrt.pipeline import build_bundle

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
# Closed questions, each with options of which the first is right.
DECISIONS = {
    "12+34=": ("46", "45", "56"),
    "reverse planet": ("tenalp", "planet", "natpel"),
    "sort 40172": ("01247", "40172", "74210"),
}
SUM_SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
AnswerT = TypeVar("AnswerT")
# A tiny model may miss a question or two; more means that something is broken.
MAY_MISS = 2
DEMO_SEED = 0


@dataclass(frozen=True)
class QuestionRow:
    """One question, and its answer over each protocol. Times are in milliseconds."""

    question: str
    http: str
    grpc: str
    openai: str
    right: bool
    steps: list[int]
    http_ms: float
    grpc_ms: float
    openai_ms: float


@dataclass(frozen=True)
class Decided:
    """One closed question, its answer over the OpenAI API, and that answer's probability."""

    question: str
    choice: str
    probability: float
    right: bool
    ms: float


def run_walkthrough(keep: Path | None, as_json: bool) -> None:
    """Run the demo and print its table. CanvasError when too many answers are wrong."""
    started = time.perf_counter()
    with _folder(keep) as folder, progress() as show:
        build_bundle("demo", "cpu", folder / "engines", progress=show)
        built = time.perf_counter()
        show("packaging", 0, 0)
        made = package(folder / "engines", folder / "package")
        show("starting tritonserver", 0, 0)
        log = folder / "triton.log"
        with (
            repository_of(made) as repository,
            Server(repository, ports=Ports(0, 0, 0), log=log) as server,
            FrontEnd.over(server, FrontOptions(port=0)) as front,
        ):
            ready = time.perf_counter()
            show("asking", 0, 0)
            rows = ask_all(server, front.url)
            decided = decide_all(front.url)
            followed = ask_for_json(front.url)
        stopped = time.perf_counter()
    seconds = {
        "build": built - started,
        "package_and_start": ready - built,
        "total": stopped - started,
    }
    _print(rows, decided, followed, seconds, as_json)
    judge(rows)


def ask_all(server: Server, openai_url: str) -> list[QuestionRow]:
    """Ask every question over all protocols."""
    with (
        Client(f"{server.address}:{server.ports.http}", "http") as http,
        Client(f"{server.address}:{server.ports.grpc}", "grpc") as grpc,
    ):
        openai = OpenAIClient(openai_url)
        for ask in (http.infer, grpc.infer, openai.ask):
            ask({"prompt": DEMO_PROMPTS[0]})  # the first call allocates buffers
        rows = []
        for question in DEMO_PROMPTS:
            inputs = {"prompt": question, "seed": DEMO_SEED}
            by_http, http_ms = _timed(http.infer, inputs)
            by_grpc, grpc_ms = _timed(grpc.infer, inputs)
            by_openai, openai_ms = _timed(openai.ask, inputs)
            rows.append(
                QuestionRow(
                    question=question,
                    http=by_http.text,
                    grpc=by_grpc.text,
                    openai=by_openai["text"],
                    right=is_correct(question, by_http.text),
                    steps=by_http.steps,
                    http_ms=http_ms,
                    grpc_ms=grpc_ms,
                    openai_ms=openai_ms,
                )
            )
    return rows


def decide_all(openai_url: str) -> list[Decided]:
    """Ask every closed question over the OpenAI API."""
    client = OpenAIClient(openai_url)
    found = []
    for question, options in DECISIONS.items():
        closed = {
            "type": "choice",
            "instructions": "Which one is right?",
            "choices": [{"value": each} for each in options],
        }
        body = {"model": client.model, "input": question, "layout": "bare", "questions": [closed]}
        reply, ms = _timed(lambda given: client.post("decisions", given), body)
        (answer,) = reply["answers"]
        right = answer["choice"] == options[0]
        found.append(Decided(question, answer["choice"], answer["confidence"], right, ms))
    return found


def ask_for_json(openai_url: str) -> tuple[str, float]:
    """Return an answer that follows SCHEMA, and its milliseconds."""
    client = OpenAIClient(openai_url)
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM_SCHEMA}}
    body = {
        "model": client.model,
        "messages": [{"role": "user", "content": DEMO_PROMPTS[0]}],
        "response_format": wanted,
        "seed": DEMO_SEED,
    }
    reply, ms = _timed(lambda given: client.post("chat/completions", given), body)
    return str(reply["choices"][0]["message"]["content"]), ms


def _timed(
    ask: Callable[[dict[str, Any]], AnswerT], inputs: dict[str, Any]
) -> tuple[AnswerT, float]:
    before = time.perf_counter()
    answer = ask(inputs)
    return answer, (time.perf_counter() - before) * 1000


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="canvasrt-demo-") as folder:
        yield Path(folder)


def _print(
    rows: list[QuestionRow],
    decided: list[Decided],
    followed: tuple[str, float],
    seconds: dict[str, float],
    as_json: bool,
) -> None:
    right = sum(row.right for row in rows)
    data = {
        "rows": [asdict(row) for row in rows],
        "decisions": [asdict(each) for each in decided],
        "json": {"answer": followed[0], "ms": followed[1]},
        "right": right,
        "seconds": seconds,
    }

    def render(shown: Any) -> None:
        columns = ("question", "HTTP", "gRPC", "OpenAI", "right", "steps per block", "ms, each")
        shown.print(table(columns, [_cells(row) for row in rows]))
        closed = ("decision", "answer", "probability", "right", "ms")
        shown.print(table(closed, [_decided(each) for each in decided]))
        shown.print(
            table(("JSON schema", "answer", "ms"), [("sum", followed[0], f"{followed[1]:.0f}")])
        )
        shown.print(
            f"{right} of {len(rows)} right; built in {seconds['build']:.0f} s, serving"
            f" {seconds['package_and_start']:.0f} s later, {seconds['total']:.0f} s in total"
        )

    emit(data, as_json, render)


def _decided(each: Decided) -> tuple[str, ...]:
    right = "yes" if each.right else "no"
    return each.question, each.choice, f"{each.probability:.4f}", right, f"{each.ms:.0f}"


def _cells(row: QuestionRow) -> tuple[str, ...]:
    steps = " ".join(map(str, row.steps))
    times = " ".join(f"{ms:.0f}" for ms in (row.http_ms, row.grpc_ms, row.openai_ms))
    right = "yes" if row.right else "no"
    return (row.question, row.http, row.grpc, row.openai, right, steps, times)


def judge(rows: list[QuestionRow]) -> None:
    """Raise CanvasError when the protocols differ, or more than MAY_MISS answers are wrong."""
    for row in rows:
        if not row.http == row.grpc == row.openai:
            raise CanvasError(
                f"{row.question!r} got {row.http!r} over HTTP, {row.grpc!r} over gRPC and"
                f" {row.openai!r} over the OpenAI API",
                "the same seed must give the same answer: this is a bug in canvasrt",
            )
    wrong = [row.question for row in rows if not row.right]
    if len(wrong) > MAY_MISS:
        raise CanvasError(
            f"{len(wrong)} of {len(rows)} answers are wrong: {', '.join(wrong)}",
            "the demo checkpoint should answer nearly all: run `canvasrt doctor`",
        )
