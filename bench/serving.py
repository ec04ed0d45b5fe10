"""Measures what gRPC and the OpenAI API add to the runtime: to one client's first token, and in CPU time per answer.
Also measures how long 64 OpenAI clients wait for answers to the demo's questions.

It starts a server. If all cores are busy, throughput is the inverse of CPU time per answer. The clients' CPU time does
not count.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAI

from bench import results
from canvasrt.bundle import load_bundle
from canvasrt.containers.client.triton import Client
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.demo.tasks import TASKS, questions
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Block, Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from canvasrt.types import Json

CLIENTS = 64
WARM = 20  # the first answers of a side warm up and do not count
TURN = 7  # a CPU's first turn on a short prompt takes this many denoising steps
_TICKS = os.sysconf("SC_CLK_TCK")

# Prompt and seed → pieces of the answer.
Ask = Callable[[str, int], Iterator[str]]
# Prompts → answers. A prompt's seed is its index.
Crowd = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Side:
    """One way to reach the model: a function for one client, one for a crowd of clients, and the processes whose CPU
    time counts."""

    ask: Ask
    answers: Crowd
    processes: Callable[[], list[int]]


def measure(
    bundle: Path,
    rounds: int = 12,
    first_tokens: int = 200,
    mixed: int = 3000,
    out: results.Out = None,
) -> None:
    """Answer the same questions in this process and over both APIs, alternating."""
    opened = load_bundle(bundle, kind="engines", check=False)
    # No prefix cache, so every side encodes every prompt.
    options = ModelOptions(threads=1, prefix_cache=0)
    with ExitStack() as stack:
        repository = stack.enter_context(repository_of(opened))
        server = stack.enter_context(
            Server(repository, Settings(ports=Ports(0, 0, 0), model=options, log=os.devnull))
        )
        front = stack.enter_context(
            FrontEnd.over(server, FrontOptions(port=0, log_level="WARNING"))
        )
        grpc = stack.enter_context(
            Client(f"127.0.0.1:{server.ports.grpc}", "grpc", keep_stream=True)
        )
        http = stack.enter_context(OpenAI(base_url=front.url, api_key="none", max_retries=0))
        local = InProcess(opened.path)
        sides = {
            "in process": Side(local.ask, local.answers, lambda: [os.getpid()]),
            "gRPC": Side(*_over_grpc(grpc), lambda: family(server.pid)),
            "HTTP": Side(*_over_http(http), lambda: [*family(server.pid), front.pid]),
        }
        figures = {
            "first token of one client": _first_tokens(sides, first_tokens),
            f"CPU per answer, {CLIENTS} clients": _answers(sides, rounds),
            f"wait of {CLIENTS} OpenAI clients, seconds": _waits(http, mixed),
        }
    results.report(figures, out)


def _first_tokens(sides: dict[str, Side], count: int) -> list[Json]:
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(count + WARM):
        word = "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 8))
        for name in list(sides) if number % 2 else reversed(sides):
            start = time.perf_counter()
            pieces = sides[name].ask(f"reverse {word}", number)
            next(pieces)
            times[name].append(1e3 * (time.perf_counter() - start))
            list(pieces)  # reads the answer to its end
    base = times["in process"][WARM:]
    return [
        {
            "side": name,
            "ms": statistics.median(took[WARM:]),
            "adds, ms": statistics.median(a - b for a, b in zip(took[WARM:], base, strict=True)),
        }
        for name, took in times.items()
    ]


def _answers(sides: dict[str, Side], rounds: int) -> list[Json]:
    """Return CPU milliseconds per answer, each side's throughput relative to the runtime's, and wrong answers."""
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in sides}
    wrong = dict.fromkeys(sides, 0)
    for round_ in range(rounds + 1):
        texts = [
            "reverse " + "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 8))
            for _ in range(2 * CLIENTS)
        ]
        expected: list[str] = []
        for name, side in sides.items():
            before = usage()
            answers = side.answers(texts)
            after = usage()
            expected = expected or answers
            wrong[name] += sum(a != b for a, b in zip(answers, expected, strict=True))
            if round_:  # the first round warms up
                spent = sum(after[pid] - before[pid] for pid in side.processes())
                times[name].append(1e3 * spent / len(texts))
    base = times["in process"]
    return [
        {
            "side": name,
            "ms": statistics.median(took),
            "of the throughput": statistics.median(a / b for a, b in zip(base, took, strict=True)),
            "wrong": wrong[name],
        }
        for name, took in times.items()
    ]


def _waits(client: OpenAI, count: int) -> list[Json]:
    """Return how long mixed questions take: all of them, and separately those that one turn answers and the others."""
    rng = random.Random(0)
    texts = [each for task in TASKS for each in questions(task)]

    def ask(seed: int) -> tuple[float, int]:
        begin = time.perf_counter()
        reply = client.chat.completions.create(**_chat(rng.choice(texts), seed))
        took = time.perf_counter() - begin
        assert reply.usage is not None
        return took, int((reply.usage.model_extra or {})["denoising_steps"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(2 * CLIENTS)))  # warms up
        begin = time.perf_counter()
        found = list(pool.map(ask, range(count)))
        seconds = time.perf_counter() - begin
    took, steps = np.array([each[0] for each in found]), np.array([each[1] for each in found])
    rows = []
    for name, some in (
        ("all", steps > 0),
        (f"at most {TURN} steps", steps <= TURN),
        ("more", steps > TURN),
    ):
        middle, most, tail = np.percentile(took[some], [50, 90, 99]).tolist()
        mean = float(took[some].mean())
        row = {"answers": name, "per second": float(some.sum()) / seconds, "mean": mean}
        rows.append({**row, "p50": middle, "p90": most, "p99": tail, "p99/mean": tail / mean})
    return rows


class InProcess:
    """Answers questions with the runtime alone."""

    def __init__(self, path: Path) -> None:
        self._model = open_model(path, threads=1, check=False)
        assert self._model.bundle is not None
        self._tokenizer = Tokenizer.load(self._model.bundle)
        self._params = SamplingParams.from_defaults(self._model.sampler, self._model.config)

    def ask(self, prompt: str, seed: int) -> Iterator[str]:
        for event in Generator(self._model).stream(self._request(prompt, seed)):
            if isinstance(event, Block):
                yield self._tokenizer.decode(event.tokens)

    def answers(self, texts: Sequence[str]) -> list[str]:
        requests = [self._request(text, seed) for seed, text in enumerate(texts)]
        results = Generator(self._model).run(requests)
        return [self._tokenizer.decode(each.token_ids) for each in results]

    def _request(self, prompt: str, seed: int) -> Request:
        ids = self._tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return Request(ids, replace(self._params, seed=seed))


def _over_grpc(client: Client) -> tuple[Ask, Crowd]:
    def ask(prompt: str, seed: int) -> Iterator[str]:
        for event in client.stream({"prompt": prompt, "seed": seed}):
            if event.text:
                yield event.text

    return ask, _crowd(lambda text, seed: client.infer({"prompt": text, "seed": seed}).text)


def _over_http(client: OpenAI) -> tuple[Ask, Crowd]:
    def ask(prompt: str, seed: int) -> Iterator[str]:
        for chunk in client.chat.completions.create(**_chat(prompt, seed), stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    def answer(prompt: str, seed: int) -> str:
        reply = client.chat.completions.create(**_chat(prompt, seed))
        return str(reply.choices[0].message.content)

    return ask, _crowd(answer)


def _chat(prompt: str, seed: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "canvasrt", "messages": messages, "seed": seed}


def _crowd(answer: Callable[[str, int], str]) -> Crowd:
    """Return a function in which `CLIENTS` threads ask. A thread asks its next question after its last answer."""

    def answers(texts: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(answer, texts, range(len(texts))))

    return answers


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    parents = {each: int(fields[1]) for each, fields in _processes().items()}
    found = [pid]
    for each in found:  # the list grows inside the loop
        found += [child for child, parent in parents.items() if parent == each]
    return found


def usage() -> dict[int, float]:
    """Return the CPU seconds that each process has used, by process id."""
    return {
        pid: (int(fields[11]) + int(fields[12])) / _TICKS for pid, fields in _processes().items()
    }


def _processes() -> dict[int, list[str]]:
    """Return the fields of every process's `/proc/PID/stat` from the state on, by process id."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
    return found
