"""Compares the CPU time of reads and constrained answers with ordinary requests, alternating in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import results
from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.answers.layout import Ask, end_of_answer
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from canvasrt.types import Json

TEXT = "the train to the coast is late again"
SUMS = [f"{a}+{b}=" for a, b in ((12, 34), (51, 7), (80, 19), (33, 33), (6, 85))]
_SUM = {"type": "integer", "minimum": 0, "maximum": 199}
GRAMMARS: dict[str, dict[str, Any]] = {
    "digits": {"type": "regex", "regex": "[0-9]{1,3}"},
    "JSON": {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {"sum": _SUM},
            "required": ["sum"],
            "additionalProperties": False,
        },
    },
}


def measure(bundle: Path, threads: int = 1, rounds: int = 25, out: results.Out = None) -> None:
    """Measure a bundle with a tokenizer, such as the demo's. Milliseconds are CPU time, summed over all threads."""
    model = open_model(bundle, threads=threads)
    assert model.bundle is not None
    tokenizer = Tokenizer.load(model.bundle)
    figures = {
        "reads": list(_reads(model, tokenizer, rounds)),
        "constrained answers": list(_constrained(model, tokenizer, rounds)),
    }
    results.report(figures, out)


def _ms(work: Callable[[], Any]) -> float:
    before = time.process_time()
    work()
    return 1e3 * (time.process_time() - before)


def _reads(model: Model, tokenizer: Tokenizer, rounds: int) -> Iterator[Json]:
    """Yield the cost of reading one and ten questions, and of a prefill of the same prompt plus one denoising pass."""
    one_pass = SamplingParams.from_defaults(
        model.sampler, model.config, max_denoising_steps=1, max_new_tokens=model.canvas_length
    )
    for count in (1, 10):
        questions = [{"type": "predicate", "instructions": f"Is it {n}?"} for n in range(count)]
        ask = Ask.from_json({"questions": questions})
        read = ask.request([{"role": "user", "content": TEXT}], model, tokenizer, 0)
        plain = Request(read.prompt_token_ids, one_pass)
        pairs = [
            [_ms(lambda each=each: Generator(model).run([each])) for each in (read, plain)]  # type: ignore[misc]
            for _ in range(rounds + 1)
        ][1:]  # the first call allocates
        yield {
            "questions": count,
            "prompt": len(read.prompt_token_ids),
            "read, ms": statistics.median(a for a, _ in pairs),
            "prefill and pass, ms": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
        }


def _constrained(model: Model, tokenizer: Tokenizer, rounds: int) -> Iterator[Json]:
    """Yield steps, time and right answers, without a grammar and under each one."""
    config = model.config
    words = Vocabulary(tokenizer, config.vocab_size, config.eos_token_ids)
    starts = {name: compile_grammar(each, words, name) for name, each in GRAMMARS.items()}
    end = end_of_answer(model, tokenizer)
    for name in ("free", *GRAMMARS):
        steps, took, right = [], [], 0
        for seed in range(rounds):
            text = SUMS[seed % len(SUMS)]
            ids = tokenizer.encode_chat([{"role": "user", "content": text}])
            params = SamplingParams.from_defaults(
                model.sampler, config, seed=seed, max_new_tokens=100
            )
            request: Any = Request(ids, params)
            if name != "free":
                request = ConstrainedRequest(ids, params, start=starts[name], end=end)
            before = time.process_time()  # of all threads: grammar searches run in threads
            (result,) = Generator(model).run([request])
            steps.append(sum(result.steps))
            took.append(1e3 * (time.process_time() - before) / steps[-1])
            digits = "".join(filter(str.isdigit, tokenizer.decode(result.token_ids)))
            right += digits == str(sum(map(int, text.rstrip("=").split("+"))))
        yield {
            "grammar": name,
            "steps": statistics.mean(steps),
            "ms per step": statistics.median(took),
            "right": right,
            "asked": rounds,
        }
