"""What serving adds to the first token at one client, and how much throughput it leaves at many:
`python -m bench.overhead BUNDLE` starts a server of its own."""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from canvasrt.bundle import load_bundle
from canvasrt.containers.client.triton import Client
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.runtime.generator import Block, Generator, Request
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

ROUNDS, WARM = 200, 20
THREADS = 1

Call = Callable[[str, int], float]  # prompt, seed → seconds to the first token


def main() -> None:
    """Ask the same questions over every path in turn; print medians and what each path adds."""
    bundle = load_bundle(Path(sys.argv[1]), kind="engines", check=False)
    options = ModelOptions(threads=THREADS, prefix_cache=0)  # every side encodes each prompt
    ports = Ports(0, 0, 0).with_free_ones("127.0.0.1")
    with (
        repository_of(bundle) as repository,
        Server(repository, ports=ports, model=options, log=Path(os.devnull)) as server,
        FrontEnd.over(server, FrontOptions(port=0, log_level="WARNING")) as front,
        Client(f"127.0.0.1:{server.ports.grpc}", "grpc", keep_stream=True) as grpc,
    ):
        sides: dict[str, Call] = {
            "in process": _in_process(bundle.path),
            "gRPC": _over_grpc(grpc),
            "OpenAI": _over_openai(front.url),
        }
        times = measure(sides)
    base = times["in process"]
    for name, found in times.items():
        added = statistics.median(a - b for a, b in zip(found, base, strict=True))
        print(f"{name:12} {1e3 * statistics.median(found):6.2f} ms, adds {1e3 * added:5.2f} ms")


def measure(sides: dict[str, Call]) -> dict[str, list[float]]:
    """Return the seconds per side."""
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + WARM):
        word = "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 8))
        names = list(sides) if number % 2 else list(sides)[::-1]
        for name in names:
            seconds = sides[name](f"reverse {word}", number)
            if number >= WARM:
                times[name].append(seconds)
    return times


def _in_process(path: Path) -> Call:
    model = open_model(path, threads=THREADS, check=False)
    assert model.bundle is not None
    tokenizer = Tokenizer.load(model.bundle)
    params = SamplingParams.from_defaults(model.sampler, model.config)
    generator = Generator(model)

    def ask(prompt: str, seed: int) -> float:
        start = time.perf_counter()
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        first = 0.0
        for event in generator.stream(Request(ids, replace(params, seed=seed))):
            if isinstance(event, Block) and not first:
                tokenizer.decode(event.tokens)
                first = time.perf_counter() - start
        return first

    return ask


def _over_grpc(client: Client) -> Call:
    def ask(prompt: str, seed: int) -> float:
        start = time.perf_counter()
        first = 0.0
        for event in client.stream({"prompt": prompt, "seed": seed}):
            if event.text and not first:
                first = time.perf_counter() - start
        return first

    return ask


def _over_openai(url: str) -> Call:
    host = url.removeprefix("http://").removesuffix("/v1")
    connection = http.client.HTTPConnection(host)

    def ask(prompt: str, seed: int) -> float:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "canvasrt", "messages": messages, "seed": seed, "stream": True}
        start = time.perf_counter()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        reply = connection.getresponse()
        first = 0.0
        for line in reply:
            if first or b'"content": ""' in line or b'"content"' not in line:
                continue
            first = time.perf_counter() - start
        return first

    return ask


if __name__ == "__main__":
    main()
