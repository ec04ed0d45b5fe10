"""Measures how long requests with grammars hold others up, and how long it takes to prepare them.

python -m bench.stalls BUNDLE, of a model with a large vocabulary; its tokenizer is made up. One is
`python -m canvasrt.export.synthetic --shape narrow -o DIR`, built for a CPU.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench.vocabulary import large_tokenizer
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.grammar import GrammarState, Vocabulary, compile_grammar
from canvasrt.runtime.generator import Event, Finished, Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams

PROMPT = [2, *range(1000, 1020)]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["name", "age", "tags", "zip"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a sum": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]},
    "a person": PERSON,
    "ten persons": {"type": "array", "items": PERSON, "minItems": 10},
    "a long text": {"type": "string", "minLength": 200, "maxLength": 400},
    "an email address": {"type": "string", "format": "email"},
}


@dataclass
class Stalls:
    """Seconds: the longest between two steps of a neighbour, and those of compiling and joining."""

    step: float = 0.0
    compiling: float = 0.0
    joining: float = 0.0
    refused: str = ""


def main() -> None:
    """Print a line per schema."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    model = open_model(given.bundle, threads=given.threads)
    config = model.config
    words = Vocabulary(large_tokenizer(config.vocab_size), config.vocab_size, (1, 3))
    alone = measured(model, words, None)
    print(f"without a grammar: {alone.step * 1e3:.0f} ms between steps at most")
    for name, schema in SCHEMAS.items():
        found = measured(model, words, schema)
        print(
            f"{name}: {found.step * 1e3:.0f} ms between steps at most, joining {found.joining * 1e3:.1f}"
            f" ms, compiling {found.compiling * 1e3:.0f} ms{found.refused}"
        )


def measured(model: Model, words: Vocabulary, schema: dict[str, Any] | None) -> Stalls:
    """Run a neighbour, and compile a grammar and let a request with it join meanwhile."""
    generator, found = Generator(model), Stalls()
    options: dict[str, Any] = {"canvas_length": 32, "max_new_tokens": 32}
    long = SamplingParams.from_defaults(
        model.sampler, model.config, **options, max_denoising_steps=10_000, early_stop=False
    )
    neighbour = generator.add(Request(PROMPT, long))
    for _ in range(5):
        generator.step()

    def compiled() -> GrammarState | None:
        begin = time.perf_counter()
        try:
            return compile_grammar({"type": "json_schema", "schema": schema}, words, "grammar")
        except CanvasError as error:
            found.refused = f", refused: {error.message}"
            return None
        finally:
            found.compiling = time.perf_counter() - begin

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(compiled) if schema else None
        last, left = time.perf_counter(), 10
        while left:
            if job is not None and job.done():
                start, job = job.result(), None
                if start is not None:
                    params = SamplingParams.from_defaults(
                        model.sampler, model.config, **options | {"max_denoising_steps": 1}
                    )
                    begin = time.perf_counter()
                    generator.add(ConstrainedRequest(PROMPT, params, start, 1))
                    found.joining = time.perf_counter() - begin
            left -= job is None
            for event in generator.step():
                if _is_step(event, neighbour):
                    now = time.perf_counter()
                    found.step, last = max(found.step, now - last), now
    generator.cancel(neighbour)
    while not generator.idle:
        generator.step()
    return found


def _is_step(event: Event, id: int) -> bool:
    return event.id == id and not isinstance(event, Finished)


if __name__ == "__main__":
    main()
