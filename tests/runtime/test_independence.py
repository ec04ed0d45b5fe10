"""A request's tokens depend on the request alone, not on its neighbours, the batch or the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from canvasrt.build.options import BuildOptions
from canvasrt.errors import CanvasError
from canvasrt.pipeline import build_bundle
from canvasrt.runtime.backends.onnxruntime import OrtBackend
from canvasrt.runtime.bundle_facts import pass_work
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Block, Draft, Finished, Request, Result
from canvasrt.runtime.sampling_params import SamplingParams

BASE = SamplingParams(
    max_new_tokens=64, max_denoising_steps=11, entropy_bound=1.0, confidence_threshold=1.0
)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Six requests that differ in everything a request may choose."""
    import numpy as np

    def prompt(length: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(3, 100, length).tolist()

    return [
        Request(prompt(70, 1), replace(BASE, seed=1)),
        Request(prompt(5, 2), replace(BASE, seed=2, max_new_tokens=96, t_max=0.5)),
        Request(prompt(63, 3), replace(BASE, seed=3, max_denoising_steps=3)),
        Request(prompt(64, 4), replace(BASE, seed=4, entropy_bound=5.0, early_stop=False)),
        Request(prompt(130, 5), replace(BASE, seed=5, stability_threshold=2)),
        Request(prompt(1, 6), replace(BASE, seed=2**64 - 1, max_new_tokens=1, t_min=0.1)),
    ]


@pytest.fixture(scope="module")
def alone(tiny, requests: list[Request]) -> list[Result]:
    """Each request by itself."""
    return [Generator(tiny.model, 1).run([request])[0] for request in requests]


def same(results: list[Result], expected: list[Result]) -> bool:
    return [(r.token_ids, r.steps, r.finish_reason) for r in results] == [
        (r.token_ids, r.steps, r.finish_reason) for r in expected
    ]


@pytest.mark.parametrize("max_batch", [2, 8])
def test_a_batch_of_different_requests(tiny, requests, alone, max_batch: int) -> None:
    assert same(Generator(tiny.model, max_batch).run(requests), alone)


def test_the_order_of_arrival(tiny, requests, alone) -> None:
    results = Generator(tiny.model, 3).run(requests[::-1])
    assert same(results[::-1], alone)


@pytest.mark.parametrize("every", [1, 5])
def test_admission_while_others_run(tiny, requests, alone, every: int) -> None:
    generator = Generator(tiny.model, 4)
    waiting = list(enumerate(requests))
    index_of: dict[int, int] = {}
    results: dict[int, Result] = {}
    steps = 0
    while waiting or not generator.idle:
        if waiting and steps % every == 0:
            index, request = waiting.pop(0)
            index_of[generator.add(request)] = index
        for event in generator.step():
            if isinstance(event, Finished):
                results[index_of[event.id]] = event.result
        steps += 1
    assert same([results[i] for i in range(len(requests))], alone)


def test_the_same_seed_again_and_in_a_new_process_of_the_model(tiny, requests, alone) -> None:
    assert same(Generator(tiny.model).run(requests), alone)
    fresh = open_model(tiny.bundle, threads=1)
    assert same(Generator(fresh).run(requests), alone)


def test_other_seeds_give_other_tokens(tiny, requests) -> None:
    first = requests[0]
    tokens = {
        tuple(tiny.generate([first.prompt_token_ids], [replace(first.params, seed=s)])[0].token_ids)
        for s in range(4)
    }
    assert len(tokens) == 4


def test_rows_in_one_pass_give_the_same_tokens(tiny, requests, alone) -> None:
    """How a backend with real batches runs: padded rows in one pass, equal up to rounding."""
    together = open_model(tiny.bundle, threads=1)
    together.rows_apart = False
    passes = together.counters
    assert same(Generator(together, 4).run(requests), alone)
    assert passes.denoise_passes < sum(sum(result.steps) for result in alone)


def test_a_cancelled_neighbour(tiny, requests, alone) -> None:
    generator = Generator(tiny.model, 4)
    ids = [generator.add(request) for request in requests[:4]]
    results: dict[int, Result] = {}
    for step in range(10_000):
        if step == 3:
            generator.cancel(ids[1])
        for event in generator.step():
            if isinstance(event, Finished):
                results[event.id] = event.result
        if generator.idle:
            break
    assert results[ids[1]].finish_reason == "cancelled"
    kept = [i for i in range(4) if i != 1]
    assert same([results[ids[i]] for i in kept], [alone[i] for i in kept])


def test_settings_really_differ(alone: list[Result]) -> None:
    assert alone[2].steps == [3, 3]
    assert alone[3].steps == [11, 11]
    assert len(alone[1].steps) == 3
    assert len(alone[5].token_ids) == 1


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


def test_leaving_a_stream_frees_the_generator(tiny, requests) -> None:
    generator = Generator(tiny.model)
    for _ in generator.stream(requests[1]):
        break
    assert generator.idle


def test_a_stream_whose_events_another_loop_took_is_refused(tiny, requests) -> None:
    generator = Generator(tiny.model)
    first = generator.stream(requests[1])
    next(first)
    generator.run([requests[0]])
    with pytest.raises(CanvasError, match="another loop took events"):
        list(first)


def test_graphs_and_cpu_engines_give_the_same_tokens(tiny, requests, alone) -> None:
    """Graphs give experts a capacity of slots; CPU engines sort tokens by expert."""
    graphs = open_model(tiny.graphs, threads=1)
    assert same(Generator(graphs).run(requests), alone)


def test_overflowing_experts_are_run_again(tiny, requests, alone, monkeypatch) -> None:
    graphs = open_model(tiny.graphs, threads=1)
    monkeypatch.setattr("canvasrt.runtime.body_inputs.Capacity.choose", lambda self, tokens: 1)
    results = Generator(graphs).run(requests)
    assert same(results, alone)
    assert graphs.counters.overflows >= sum(sum(result.steps) for result in results)


def test_cpu_engines_never_overflow(tiny, alone) -> None:
    assert tiny.model.counters.overflows == 0


def test_more_threads_give_the_same_tokens(tiny, requests, alone) -> None:
    """Threads may run several requests at once, or share the products of one."""
    beside = open_model(tiny.bundle, threads=3)
    assert same(Generator(beside, 4).run(requests), alone)
    sharing = open_model(tiny.bundle, backend=OrtBackend(threads=3))
    assert same(Generator(sharing, 4).run(requests[:3]), alone[:3])


def test_threads_go_to_requests_when_passes_are_small(tiny) -> None:
    small, large = OrtBackend(4, work=pass_work(tiny.model.config)), OrtBackend(4, work=10**10)
    assert (small.threads, small.max_workers) == (1, 4)
    assert (large.threads, large.max_workers) == (4, 1)


@pytest.mark.acceptance
def test_packed_weights_keep_the_promise(requests, tmp_path: Path) -> None:
    """A CPU multiplies INT4 with different kernels, whose results must not depend on rows or threads either."""
    bundle = build_bundle("demo", "cpu", tmp_path / "int4", BuildOptions("int4"))
    model = open_model(bundle.path, threads=1)
    alone = [Generator(model, 1).run([request])[0] for request in requests]
    assert same(Generator(model, 4).run(requests), alone)
    assert same(Generator(open_model(bundle.path, threads=3), 4).run(requests), alone)
    sharing = open_model(bundle.path, backend=OrtBackend(threads=3))
    assert same(Generator(sharing, 4).run(requests[:3]), alone[:3])
