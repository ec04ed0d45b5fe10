"""Measures reads next to ordinary denoising passes, and constrained answers next to free ones, in one
process and by turns.

python -m bench.answers BUNDLE
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.answers.layout import Ask, end_of_answer
from canvasrt.runtime.generator import Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

TEXT = "the train to the coast is late again"


def main() -> None:
    """Print medians and the ratio of each read to a prefill with one denoising pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--constrained", action="store_true", help="compare grammars instead")
    given = parser.parse_args()
    model = open_model(given.bundle, threads=given.threads)
    assert model.bundle is not None
    tokenizer = Tokenizer.load(model.bundle)
    if given.constrained:
        _constrained(model, tokenizer, given.rounds)
        return
    runs: dict[str, Callable[[], float]] = {}
    for count in (1, 10):
        ask, read = _read(model, tokenizer, count)
        one_pass = SamplingParams.from_defaults(
            model.sampler,
            model.config,
            max_denoising_steps=1,
            max_new_tokens=model.canvas_length,
        )
        plain = Request(read.prompt_token_ids, one_pass)
        runs[f"prefill and one denoising pass, {len(read.prompt_token_ids)} tokens"] = _timed(
            model, plain
        )
        runs[f"read of {len(ask.questions)} questions"] = _timed(model, read)
    for run in runs.values():  # the first calls allocate
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            times[name].append(run())
    medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    for plain_name, read_name in zip(list(medians)[::2], list(medians)[1::2], strict=True):
        pairs = zip(times[read_name], times[plain_name], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{plain_name}: {medians[plain_name]:.2f} ms")
        print(f"{read_name}: {medians[read_name]:.2f} ms, {ratio:.2f} times as long")


def _read(model: Model, tokenizer: Tokenizer, count: int) -> tuple[Ask, Any]:
    questions = [{"type": "predicate", "instructions": f"Is it {n}?"} for n in range(count)]
    ask = Ask.from_json({"questions": questions})
    return ask, ask.request([{"role": "user", "content": TEXT}], model, tokenizer, 0)


SUMS = [f"{a}+{b}=" for a, b in ((12, 34), (51, 7), (80, 19), (33, 33), (6, 85))]
GRAMMARS: dict[str, dict[str, Any]] = {
    "digits": {"type": "regex", "regex": "[0-9]{1,3}"},
    "80 letters": {"type": "regex", "regex": "[a-z]{80}"},
    "JSON": {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 199}},
            "required": ["sum"],
            "additionalProperties": False,
        },
    },
}


def _constrained(model: Model, tokenizer: Tokenizer, rounds: int) -> None:
    """Print steps, time and right answers, free and under each grammar."""
    config = model.config
    words = Vocabulary(tokenizer, config.vocab_size, config.eos_token_ids)
    starts = {name: compile_grammar(each, words, name) for name, each in GRAMMARS.items()}
    found: dict[str, list[tuple[int, float, bool]]] = {}
    for round in range(rounds):
        text = SUMS[round % len(SUMS)]
        a, b = text.rstrip("=").split("+")
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        params = SamplingParams.from_defaults(model.sampler, config, seed=round, max_new_tokens=100)
        requests: dict[str, Any] = {"free": Request(ids, params)}
        end = end_of_answer(model, tokenizer)
        requests |= {name: ConstrainedRequest(ids, params, s, end) for name, s in starts.items()}
        for name, request in requests.items():
            before = time.process_time()  # of all threads: searches run beside the passes
            (result,) = Generator(model).run([request])
            seconds = time.process_time() - before
            shown = tokenizer.decode(result.token_ids)
            digits = "".join(each for each in shown if each.isdigit())
            right = digits == str(int(a) + int(b))
            found.setdefault(name, []).append((sum(result.steps), seconds, right))
    for name, each in found.items():
        steps = statistics.mean(one[0] for one in each)
        ms = statistics.median(one[1] / one[0] for one in each) * 1e3
        print(
            f"{name}: {steps:.1f} steps, {ms:.1f} ms of CPU per step, {sum(one[2] for one in each)} of "
            f"{len(each)} right"
        )


def _timed(model: Model, request: Any) -> Callable[[], float]:
    def run() -> float:
        before = time.perf_counter()
        Generator(model).run([request])
        return time.perf_counter() - before

    return run


if __name__ == "__main__":
    main()
