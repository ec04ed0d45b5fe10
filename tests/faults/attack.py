"""What the longer runs share: a served random model, questions with known answers, and a report."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canvasrt.containers.package.package import package
from canvasrt.pipeline import build_bundle
from tests.helpers.serving import export_random
from tests.helpers.serving_process import Serving

QUESTIONS = tuple(f"{a}+{b}=" for a in (12, 7, 40, 99) for b in (34, 5))
JSON = {"Content-Type": "application/json"}


def report(outcomes: Mapping[str, int], wrong: Sequence[str]) -> int:
    """Print how often each outcome came, and what went wrong; return the exit code."""
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:7}  {outcome}")
    print(f"{len(wrong):7}  wrong", *wrong[:20], sep="\n")
    return 1 if wrong else 0


def arguments(about: str, **numbers: int) -> argparse.Namespace:
    """Return the options of one run, each a whole number with its default, and the package."""
    parser = argparse.ArgumentParser(description=about)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--package", type=Path, help="what to serve; a random model by default")
    return parser.parse_args()


@contextlib.contextmanager
def workspace(given: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a package, and a scratch folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        if given is None:
            build_bundle(export_random(folder).path, "cpu", folder / "engines")
            package(folder / "engines", folder / "package")
        yield given or folder / "package", folder


def host_of(running: Serving) -> str:
    """Return host:port of the OpenAI API."""
    return str(running.said["openai"]).removeprefix("http://").partition("/")[0]


def ask(host: str, question: str, timeout: float = 60, **fields: Any) -> tuple[int, Any]:
    """Return the status and the body of one chat, whose answer depends on the question alone."""
    body = {
        "model": "canvasrt",
        "messages": [{"role": "user", "content": question}],
        "seed": 5,
        "max_tokens": 40,
        "max_denoising_steps": 6,
        **fields,
    }
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def get(host: str, path: str, timeout: float = 60) -> tuple[int, bytes]:
    """Return the status and the body of one GET."""
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def text_of(body: Any) -> str:
    """Return the answer in the body of a chat."""
    return str(body["choices"][0]["message"]["content"])


def known_answers(host: str) -> dict[str, str]:
    """Return the answer to each question, asked alone."""
    return {each: text_of(ask(host, each)[1]) for each in QUESTIONS}
