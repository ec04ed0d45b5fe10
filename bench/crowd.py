"""Many clients at once: every answer is checked, and what serving costs beside the engines:
`python -m bench.crowd BUNDLE` starts a server of its own."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import tritonclient.grpc
import tritonclient.grpc.aio
from openai import AsyncOpenAI

from canvasrt.bundle import load_bundle
from canvasrt.containers.client.triton import make_tensors
from canvasrt.containers.options import FrontOptions, ModelOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.tensors import ANSWER_MODEL
from canvasrt.runtime.generator import Generator, Request
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

CLIENTS, EACH = 64, 8
_TICKS = os.sysconf("SC_CLK_TCK")

Question = tuple[str, int]  # prompt and seed
Ask = Callable[[Question], Awaitable[str]]


def main() -> None:
    """Answer the same questions in process and over both APIs; print the CPU time per answer.

    On cores that are busy all the time, throughput is inverse to that time. The clients' own is not
    part of it.
    """
    bundle = load_bundle(Path(sys.argv[1]), kind="engines", check=False)
    rng = random.Random(0)
    words = ["".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 8)) for _ in range(CLIENTS * EACH)]
    questions = [(f"reverse {word}", seed) for seed, word in enumerate(words)]
    expected, base = in_process(bundle.path, questions)
    print(f"in process  {1e3 * base / len(questions):6.2f} ms of CPU per answer")
    ports = Ports(0, 0, 0).resolve("127.0.0.1")
    options = ModelOptions(prefix_cache=0)
    with (
        repository_of(bundle) as repository,
        Server(repository, ports=ports, model=options, log=Path(os.devnull)) as server,
        FrontEnd.over(server, FrontOptions(port=0, log_level="WARNING")) as front,
    ):
        processes = [*family(server.pid), front.pid]
        for name, sides in (
            ("gRPC", lambda: over_grpc(f"127.0.0.1:{server.ports.grpc}")),
            ("OpenAI", lambda: over_openai(front.url)),
        ):
            asyncio.run(crowd(sides(), questions[:CLIENTS]))  # warms up
            before, start = sum(map(cpu, processes)), time.perf_counter()
            answers = asyncio.run(crowd(sides(), questions))
            seconds = time.perf_counter() - start
            used = sum(map(cpu, processes)) - before
            wrong = sum(a != b for a, b in zip(answers, expected, strict=True))
            print(
                f"{name:10}  {1e3 * used / len(questions):6.2f} ms of CPU per answer, "
                f"{base / used:.2f} of the throughput; {len(questions) / seconds:.0f} answers/s "
                f"with the clients on the same cores; {wrong} wrong"
            )


def in_process(path: Path, questions: Sequence[Question]) -> tuple[list[str], float]:
    """Return the answers, and the CPU seconds that they took."""
    model = open_model(path, check=False)
    assert model.bundle is not None
    tokenizer = Tokenizer.load(model.bundle)
    params = SamplingParams.from_defaults(model.sampler, model.config)

    def answer(asked: Sequence[Question]) -> list[str]:
        chats = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text, _ in asked]
        requests = [
            Request(ids, replace(params, seed=seed))
            for ids, (_, seed) in zip(chats, asked, strict=True)
        ]
        return [tokenizer.decode(each.token_ids) for each in Generator(model).run(requests)]

    answer(questions[:CLIENTS])
    start = time.process_time()
    answers = answer(questions)
    return answers, time.process_time() - start


async def crowd(ask: Ask, questions: Sequence[Question]) -> list[str]:
    """Return the answers; every client asks its questions in turn."""
    answers = [""] * len(questions)

    async def client(number: int) -> None:
        for index in range(number, len(questions), CLIENTS):
            answers[index] = await ask(questions[index])

    await asyncio.gather(*map(client, range(CLIENTS)))
    return answers


def over_openai(url: str) -> Ask:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def ask(question: Question) -> str:
        messages = [{"role": "user", "content": question[0]}]
        reply = await client.chat.completions.create(
            model="canvasrt", messages=messages, seed=question[1]
        )
        return str(reply.choices[0].message.content)

    return ask


def over_grpc(address: str) -> Ask:
    clients: list[tritonclient.grpc.aio.InferenceServerClient] = []

    async def ask(question: Question) -> str:
        if not clients:  # it belongs to the event loop
            clients.append(tritonclient.grpc.aio.InferenceServerClient(address))
        inputs = {"prompt": question[0], "seed": question[1]}
        tensors = make_tensors(tritonclient.grpc, ANSWER_MODEL, inputs)
        result = await clients[0].infer(ANSWER_MODEL, tensors)
        return bytes(result.as_numpy("text")[0]).decode()

    return ask


def family(pid: int) -> list[int]:
    """Return a process and all that it started."""
    found = [pid]
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(file.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid:
            found += family(int(file.parent.name))
    return found


def cpu(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


if __name__ == "__main__":
    main()
