"""The result of a request depends only on the request, not on other requests, the batch, the device or the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.decision import Blank, DecisionRequest, Labels, Template
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.answers.infill import InfillRequest
from canvasrt.runtime.backends.onnxruntime import OrtBackend
from canvasrt.runtime.bundle_facts import pass_work
from canvasrt.runtime.conditions import Conditions
from canvasrt.runtime.generator import STATES, Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import insert, read_picture
from canvasrt.runtime.prefix import PrefixCache
from canvasrt.runtime.request import Block, Draft, Finished, Request, Result
from canvasrt.runtime.request_state import RequestState
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers import library
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.pictures import noise, png
from tests.helpers.reference import Pair

BASE = SamplingParams(
    max_new_tokens=64, max_denoising_steps=11, entropy_bound=1.0, confidence_threshold=1.0
)
FEW = tuple(range(100, 400, 7))
CONDITIONS = Conditions({1: 77, 2: 6}, {0: 40, 20: 99, 45: 400}, {2: (5, 6), 3: FEW, 50: FEW})
TREE = Labels(((9, 20, 5), (9, 21, 5), (11, 20, 6)))
TEMPLATE = Template(
    tuple(range(100, 132)), (Blank(0, 2, Labels(((7,), (300,), (45,)))), Blank(1, 8, TREE))
)
GAPS = tuple(-1 if place % 3 else 40 + place for place in range(30)) + (1, 0)
# Lengths of prompts, and sampling parameters.
TEXTS: list[tuple[int, dict[str, Any]]] = [
    (70, {}),
    (5, {"max_new_tokens": 96, "t_max": 0.5}),
    (63, {"max_denoising_steps": 3}),
    (64, {"entropy_bound": 5.0, "early_stop": False}),
    (130, {"stability_threshold": 2}),
    (1, {"seed": 2**64 - 1, "max_new_tokens": 1, "t_min": 0.1}),
    (600, {"top_k": 20, "top_p": 0.6, "entropy_bound": 20.0, "t_max": 1.5}),
    (20, {"logit_bias": ((5, -100.0), (9, 4.0))}),
    (70, {"seed": 0, "logprobs": True, "top_logprobs": 3}),
    (70, {"seed": 0, "score_blocks": True}),
    (300, {"redo_below": -1e-4, "max_redos": 1}),
    (20, {"score_by_denoising": True, "redo_below": -1e-4, "max_redos": 1}),
    (45, {"canvas_length": 4, "max_new_tokens": 20}),
    (90, {"canvas_length": 16, "settle_steps": 1}),
]


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 100, length).tolist()


@pytest.fixture(scope="module")
def requests(tiny: Pair, demo: Pair) -> list[Request]:
    """Requests of every kind, from three callers."""
    config = tiny.model.config
    made = [
        Request(prompt(length, given.get("seed", seed)), replace(BASE, **{"seed": seed, **given}))
        for seed, (length, given) in enumerate(TEXTS)
    ]
    words = Vocabulary(demo.tokenizer, config.vocab_size, (1,))
    start = compile_grammar({"type": "regex", "regex": "[a-z]{40}"}, words, "g")
    picture = read_picture(png(noise(90, 70)), config.vision or {}, 70)
    seen = insert([*prompt(20, 1), config.image_token_id or 0, 7], [picture], config)
    params = replace(BASE, max_new_tokens=32, seed=4)
    scored = replace(BASE, seed=7, logprobs=True, top_k=3, redo_below=-1e-4, max_redos=1)
    made += [
        Request(prompt(40, 7), scored, conditions=CONDITIONS),
        Request(seen, replace(BASE, seed=8), [picture]),
        ConstrainedRequest(prompt(40, 3), replace(BASE, seed=3), start=start, end=1),
        DecisionRequest(
            prompt(40, 5),
            replace(params, max_denoising_steps=2),
            templates=(TEMPLATE, TEMPLATE),
            samples=4,
        ),
        InfillRequest(prompt(40, 6), params, canvases=(GAPS,), words=np.array(FEW), end=1),
    ]
    return [replace(each, owner="abc"[n % 3]) for n, each in enumerate(made)]


@pytest.fixture(scope="module")
def alone(tiny: Pair, requests: list[Request]) -> list[Result]:
    """The results of requests that run alone."""
    return [Generator(tiny.model, 1).run([request])[0] for request in requests]


def numbers(result: Result) -> list[float]:
    """Return the probabilities and scores in a result, which may differ by rounding."""
    found = [number for each in result.logprobs for _, number in each.top]
    found += [each.score for each in result.block_scores]
    found += [getattr(result, "logprob", 0.0)]
    return found + [number for each in getattr(result, "draws", []) for number in each.flat]


def check(results: Sequence[Result], expected: Sequence[Result]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.steps, ours.finish_reason) == (theirs.steps, theirs.finish_reason)
        assert numbers(ours) == pytest.approx(numbers(theirs), abs=1e-4)


def arriving(generator: Generator, requests: Sequence[Request], every: int) -> list[Result]:
    """Run requests, adding one every few steps."""
    waiting, ids, steps = list(requests), list[int](), 0
    results: dict[int, Result] = {}
    while waiting or not generator.idle:
        if waiting and steps % every == 0:
            ids.append(generator.add(waiting.pop(0)))
        for event in generator.step():
            if isinstance(event, Finished):
                results[event.id] = event.result
        steps += 1
    return [results[id] for id in ids]


def device(pair: Pair, apart: bool = False) -> Model:
    return open_model(pair.graphs, check=False, backend=FakeBackend(rows_apart=apart))


def padded(pair: Pair) -> Model:
    """Return a model on a CPU that runs several requests in one pass."""
    model = open_model(pair.bundle, threads=1)
    model.rows_apart = False
    return model


WAYS: dict[str, Callable[[Pair, list[Request]], list[Result]]] = {
    "two": lambda pair, given: Generator(pair.model, 2).run(given),
    "eight": lambda pair, given: Generator(pair.model, 8).run(given),
    "reversed": lambda pair, given: Generator(pair.model, 3).run(given[::-1])[::-1],
    "arriving": lambda pair, given: arriving(Generator(pair.model, 4), given, 1),
    "arriving late": lambda pair, given: arriving(Generator(pair.model, 4), given, 5),
    "new process": lambda pair, given: Generator(open_model(pair.bundle, threads=1)).run(given),
    # Threads may run different requests, or share the matrix products of one.
    "threads": lambda pair, given: Generator(open_model(pair.bundle, threads=3), 4).run(given),
    "shared products": lambda pair, given: Generator(
        open_model(pair.bundle, backend=OrtBackend(threads=3)), 4
    ).run(given),
    "padded": lambda pair, given: Generator(padded(pair), 4).run(given),
    # Graphs give experts a capacity of slots; CPU engines sort tokens by expert.
    "graphs": lambda pair, given: Generator(open_model(pair.graphs, threads=1)).run(given),
    "device": lambda pair, given: Generator(device(pair), 4).run(given),
    "device apart": lambda pair, given: Generator(device(pair, apart=True), 4).run(given),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_same_results_in_any_company(
    tiny: Pair, requests: list[Request], alone: list[Result], way: Any
) -> None:
    check(way(tiny, requests), alone)


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_requests_that_take_turns_go_on_where_they_were(
    tiny: Pair,
    requests: list[Request],
    alone: list[Result],
    on_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of all kinds are parked. On a device, the tokens of a parked request are encoded again."""
    model = device(tiny) if on_device else tiny.model
    monkeypatch.setattr(model, "quantum", 5)
    parked, park = list[RequestState](), RequestState.park
    monkeypatch.setattr(RequestState, "park", lambda self: parked.append(self) or park(self))
    check(Generator(model, 1).run(requests), alone)
    assert len({each.id for each in parked}) > len(requests) / 2
    assert {type(each) for each in parked} == set(STATES.values())


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_the_prefix_cache_changes_nothing(
    tiny: Pair, requests: list[Request], alone: list[Result], on_device: bool
) -> None:
    model = device(tiny) if on_device else tiny.model
    prefixes = PrefixCache(model, 2**28)
    for _ in range(2):
        results = Generator(model, 4, prefixes).run(requests)
        check(results, alone)
    assert sum(each.cached_tokens > 0 for each in results) > len(requests) / 2


def test_overflowing_experts_are_run_again(
    tiny: Pair, requests: list[Request], alone: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = open_model(tiny.graphs, threads=1)
    monkeypatch.setattr("canvasrt.expert_slots.Capacity.choose", lambda self, tokens: 1)
    results = Generator(graphs).run(requests[:6])
    check(results, alone[:6])
    assert graphs.counters.overflows >= sum(sum(result.steps) for result in results)
    assert tiny.model.counters.overflows == 0


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_a_cancelled_neighbour(
    tiny: Pair, requests: list[Request], alone: list[Result], on_device: bool
) -> None:
    generator = Generator(device(tiny) if on_device else tiny.model, 4)
    ids = [generator.add(request) for request in requests[:6]]
    results: dict[int, Result] = {}
    steps = 0
    while not generator.idle:
        if (steps := steps + 1) == 3:
            generator.cancel(ids[1])
        for event in generator.step():
            if isinstance(event, Finished):
                results[event.id] = event.result
    assert results[ids[1]].finish_reason == "cancelled"
    kept = [i for i in range(6) if i != 1]
    check([results[ids[i]] for i in kept], [alone[i] for i in kept])


def test_requests_really_differ(tiny: Pair, requests: list[Request], alone: list[Result]) -> None:
    assert alone[2].steps == [3, 3]
    assert alone[3].steps == [11, 11]
    assert len(alone[1].steps) == 3
    assert len(alone[5].token_ids) == 1
    first = requests[0]
    others = [replace(first, params=replace(first.params, seed=seed)) for seed in range(1, 4)]
    results = [alone[0], *Generator(tiny.model).run(others)]
    assert len({tuple(each.token_ids) for each in results}) == 4
    # Asking for log-probabilities and scores changes no token.
    assert alone[8].token_ids == alone[9].token_ids == alone[0].token_ids
    assert len(alone[8].logprobs) == len(alone[14].logprobs) == 64
    assert [alone[14].token_ids[place] for place in CONDITIONS.pin] == list(CONDITIONS.pin.values())


def test_what_the_host_cannot_compute_is_refused(tiny: Pair, requests: list[Request]) -> None:
    """The request is refused before a pass, since an error during a pass would affect all requests of the batch."""
    model, read = open_model(tiny.bundle, threads=1), requests[17]
    of_one_step = replace(read, params=replace(read.params, max_denoising_steps=1))
    del model.host_head._weights["signal_mlp.down.weight"]
    for each in (requests[6], requests[7], requests[14], *requests[16:]):
        with pytest.raises(CanvasError, match="self-conditioning weights are quantized"):
            each.check(model)
    of_one_step.check(model)
    del model.host_head
    assert model.bundle is not None
    del model.bundle.manifest.data["embedding"]["host_head"]
    for each in (of_one_step, requests[7], *requests[9:12], *requests[16:]):
        with pytest.raises(CanvasError, match="no weights to score tokens"):
            each.check(model)


def test_events_tell_the_whole_story(tiny, requests, alone) -> None:
    generator = Generator(tiny.model)
    events = list(generator.stream(requests[1]))
    drafts = [event for event in events if isinstance(event, Draft)]
    blocks = [event for event in events if isinstance(event, Block)]
    assert isinstance(events[-1], Finished)
    assert generator.idle
    assert [d.step for d in drafts if d.block == 0] == list(range(1, blocks[0].steps + 1))
    assert [token for block in blocks for token in block.tokens] == alone[1].token_ids
    assert [block.finish for block in blocks] == [None, None, "length"]
    last = [d for d in drafts if d.block == 0][-1]
    assert last.tokens.tolist() == blocks[0].tokens


def test_a_stream_that_is_left_or_whose_events_another_loop_took(tiny, requests) -> None:
    generator = Generator(tiny.model)
    left: Iterator[Any] = generator.stream(requests[1])
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert generator.idle
    taken = generator.stream(requests[1])
    next(taken)
    generator.run([requests[0]])
    with pytest.raises(CanvasError, match="another call of step took"):
        list(taken)


def test_threads_go_to_requests_when_passes_are_small(tiny) -> None:
    small, large = OrtBackend(4, work=pass_work(tiny.model.config)), OrtBackend(4, work=10**10)
    assert (small.threads, small.max_workers) == (1, 4)
    assert (large.threads, large.max_workers) == (4, 1)


@pytest.mark.acceptance
def test_packed_weights_keep_the_promise(requests) -> None:
    """INT4 weights use other kernels on a CPU. Their results must not depend on rows or threads either."""
    bundle = library.bundle("demo", precision="int4")
    model, requests = open_model(bundle, threads=1), requests[:6]
    alone = [Generator(model, 1).run([request])[0] for request in requests]
    check(Generator(model, 4).run(requests), alone)
    check(Generator(open_model(bundle, threads=3), 4).run(requests), alone)
    sharing = open_model(bundle, backend=OrtBackend(threads=3))
    check(Generator(sharing, 4).run(requests[:3]), alone[:3])
