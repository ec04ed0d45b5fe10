"""Many clients at once: every answer is checked, and what serving costs beside the engines:
`python -m bench.crowd BUNDLE` starts a server of its own."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import tritonclient.grpc
import tritonclient.grpc.aio
from openai import AsyncOpenAI

from canvasrt.bundle import load_bundle
from canvasrt.containers.client.triton import make_tensors
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.tensors import ANSWER_MODEL
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.runtime.generator import Generator, Request
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

CLIENTS, ROUNDS = 64, 12
_TICKS = os.sysconf("SC_CLK_TCK")

Exchange = tuple[str, int]  # prompt and seed
# Questions → answers, and the processes that worked on them.
Side = Callable[[Sequence[Exchange]], tuple[list[str], list[int]]]


def main() -> None:
    """Answer the same questions in process and over both APIs, in turns; print the CPU time per
    answer.

    On cores that are busy all the time, throughput is inverse to that time. The clients' own is not
    part of it.
    """
    bundle = load_bundle(Path(sys.argv[1]), kind="engines", check=False)
    ports = Ports(0, 0, 0).with_free_ones("127.0.0.1")
    options = ModelOptions(prefix_cache=0)
    with (
        repository_of(bundle) as repository,
        Server(repository, ports=ports, model=options, log=Path(os.devnull)) as server,
        FrontEnd.over(server, FrontOptions(port=0, log_level="WARNING")) as front,
    ):
        local = InProcess(bundle.path)
        sides: dict[str, Side] = {
            "in process": lambda questions: (local(questions), [os.getpid()]),
            "gRPC": lambda questions: (
                asyncio.run(crowd(lambda: OverGrpc(f"127.0.0.1:{server.ports.grpc}"), questions)),
                family(server.pid),
            ),
            "OpenAI": lambda questions: (
                asyncio.run(crowd(lambda: OverOpenAI(front.url), questions)),
                [*family(server.pid), front.pid],
            ),
        }
        measure(sides)


def measure(sides: dict[str, Side]) -> None:
    """Let every side answer the questions of each round, and compare their answers and times."""
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in sides}
    wrong = dict.fromkeys(sides, 0)
    for round_ in range(ROUNDS + 1):
        words = ["".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 8)) for _ in range(2 * CLIENTS)]
        questions = [(f"reverse {word}", seed) for seed, word in enumerate(words)]
        expected: list[str] = []
        for name, side in sides.items():
            before = usage()
            answers, processes = side(questions)
            after = usage()
            expected = expected or answers
            wrong[name] += sum(a != b for a, b in zip(answers, expected, strict=True))
            if round_:  # the first warms up
                spent = sum(after[pid] - before[pid] for pid in processes)
                times[name].append(spent / len(questions))
    base = times["in process"]
    for name, found in times.items():
        share = statistics.median(a / b for a, b in zip(base, found, strict=True))
        print(
            f"{name:10} {1e3 * statistics.median(found):6.2f} ms of CPU per answer, "
            f"{share:.2f} of the throughput, {wrong[name]} wrong"
        )


class InProcess:
    """Answers questions with the runtime alone."""

    def __init__(self, path: Path) -> None:
        self._model = open_model(path, check=False)
        assert self._model.bundle is not None
        self._tokenizer = Tokenizer.load(self._model.bundle)

    def __call__(self, questions: Sequence[Exchange]) -> list[str]:
        params = SamplingParams.from_defaults(self._model.sampler, self._model.config)
        requests = [
            Request(
                self._tokenizer.encode_chat([{"role": "user", "content": text}]),
                replace(params, seed=seed),
            )
            for text, seed in questions
        ]
        results = Generator(self._model).run(requests)
        return [self._tokenizer.decode(each.token_ids) for each in results]


async def crowd(
    open_client: Callable[[], SharedConnection], questions: Sequence[Exchange]
) -> list[str]:
    """Return the answers; every client asks its questions in turn."""
    answers = [""] * len(questions)
    connection = open_client()

    async def client(number: int) -> None:
        for index in range(number, len(questions), CLIENTS):
            answers[index] = await connection.ask(*questions[index])

    await asyncio.gather(*map(client, range(CLIENTS)))
    await connection.close()
    return answers


class SharedConnection(Protocol):
    """A connection that many clients share."""

    async def ask(self, prompt: str, seed: int) -> str: ...

    async def close(self) -> None: ...


class OverOpenAI:
    """Calls the OpenAI API with its own client."""

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def ask(self, prompt: str, seed: int) -> str:
        reply = await self._client.chat.completions.create(
            model="canvasrt", messages=[{"role": "user", "content": prompt}], seed=seed
        )
        return str(reply.choices[0].message.content)

    async def close(self) -> None:
        await self._client.close()


class OverGrpc:
    """Calls Triton's answer model with its own client."""

    def __init__(self, address: str) -> None:
        self._client = tritonclient.grpc.aio.InferenceServerClient(address)

    async def ask(self, prompt: str, seed: int) -> str:
        inputs = {"prompt": prompt, "seed": seed}
        tensors = make_tensors(tritonclient.grpc, ANSWER_MODEL, inputs)
        result = await self._client.infer(ANSWER_MODEL, tensors)
        return bytes(result.as_numpy("text")[0]).decode()

    async def close(self) -> None:
        await self._client.close()


def family(pid: int) -> list[int]:
    """Return a process and all that it started."""
    parents = {each: fields[1] for each, fields in _processes().items()}
    found = [pid]
    for each in found:  # grows meanwhile
        found += [child for child, parent in parents.items() if int(parent) == each]
    return found


def usage() -> dict[int, float]:
    """Return the CPU seconds that each process has used."""
    return {
        pid: (int(fields[11]) + int(fields[12])) / _TICKS for pid, fields in _processes().items()
    }


def _processes() -> dict[int, list[str]]:
    """Return the fields of every process's stat file, from its state on."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
    return found


if __name__ == "__main__":
    main()
