"""Runs the requests of a file concurrently, and records every answer immediately."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from canvasrt.containers.batch.journal import Journal, Outputs
from canvasrt.containers.batch.lines import Line, read_lines
from canvasrt.progress import report

ATTEMPTS = 5  # maximum attempts at a request that fails because of the server
_WHAT = "answering"
# These fields depend on when a request ran. In a batch's output they are 0.
_WHEN = ("created", "created_at", "completed_at", "cached_tokens")
_RANDOM_ID = re.compile(r"((?:chatcmpl|cmpl|resp|msg|rs|fc|call)[-_])[\w-]{16,}")


class Reply(NamedTuple):
    """An HTTP status and a body. Without a reply, the status is None, and `body` says why."""

    status: int | None
    body: Any


class Answerer(Protocol):
    """An object that answers requests: several servers, or a model in this process."""

    async def ask(self, line: Line) -> Reply: ...


Opens = AbstractAsyncContextManager[Answerer]


class Done(NamedTuple):
    """A finished batch."""

    answers: int
    errors: int
    outputs: Outputs


def run_batch(
    file: Path, out: Path, seed: int, source: str, answerer: Opens, concurrency: int
) -> Done:
    """Answer all requests of `file` that the journal of `out` lacks, then write `out` and its error file.

    `source` identifies the answerer's model. Raises CanvasError before any work if the file is invalid, or if `out` was
    begun with different options.
    """
    lines, digest = read_lines(file, seed)
    outputs = Outputs.of(out)
    with Journal(outputs, {"input": digest, "seed": seed, "model": source}) as journal:
        todo = sorted(
            (each for each in lines if each not in journal), key=lambda each: each.beginning
        )
        report(_WHAT, len(journal), len(lines))
        if todo:
            asyncio.run(_answer(todo, answerer, journal, concurrency, len(lines)))
        errors = journal.finish()
    return Done(len(lines) - errors, errors, outputs)


async def _answer(
    todo: list[Line], answerer: Opens, journal: Journal, concurrency: int, total: int
) -> None:
    """Answer the requests `todo` in their order, at most `concurrency` at a time."""
    rest: Iterable[Line] = iter(todo)
    done = total - len(todo)

    async def work(opened: Answerer) -> None:
        nonlocal done
        for line in rest:
            reply = await _asked(opened, line)
            journal.add(line, entry_of(line, reply), reply.status != 200)
            done += 1
            report(_WHAT, done, total)

    async with answerer as opened:
        tasks = [asyncio.create_task(work(opened)) for _ in range(min(concurrency, len(todo)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _asked(answerer: Answerer, line: Line) -> Reply:
    """Return the reply to a request. Retries if a server failed."""
    for _ in range(ATTEMPTS):
        reply = await answerer.ask(line)
        if reply.status is not None and reply.status < 500:
            break
    return reply


def entry_of(line: Line, reply: Reply) -> Mapping[str, Any]:
    """Return a request's entry for the output file or the error file."""
    response = error = None
    if reply.status is None:
        error = {"code": "no_response", "message": reply.body}
    else:
        body = steady(reply.body, line.key)
        response = {"status_code": reply.status, "request_id": line.request_id, "body": body}
    return {
        "id": f"batch_req_{line.key}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


def steady(reply: Any, key: str) -> Any:
    """Return the reply, but replace random ids with ids derived from `key`, and times and cache counts with 0."""
    known: dict[str, str] = {}

    def walk(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {
                # Callers choose the names in `metadata`, so an `id` there is not ours.
                each: inner if each == "metadata" else walk(inner, each)
                for each, inner in value.items()
            }
        if isinstance(value, list):
            return [walk(each) for each in value]
        if name in _WHEN and isinstance(value, int | float):
            return 0
        is_id = isinstance(value, str) and (name == "id" or name.endswith("_id"))
        if is_id and (found := _RANDOM_ID.fullmatch(value)):
            return known.setdefault(value, f"{found[1]}{key}{len(known) or ''}")
        return value

    return walk(reply)
