"""Constrained answers on canvases smaller than the checkpoint's: most need many blocks, and what a
schema fixes is cut anywhere."""

from __future__ import annotations

from typing import Any

import pytest

from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.generator import Block, Draft, Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from tests.helpers.constrained import (
    END,
    SCHEMAS,
    check,
    request,
    schema,
    text_of,
)
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import Pair


@pytest.mark.parametrize("size", [4, -1])
@pytest.mark.parametrize("of", SCHEMAS, ids=str)
def test_answers_validate(demo: Pair, words: Vocabulary, of: dict[str, Any], size: int) -> None:
    start = compile_grammar(schema(of), words, "g")
    asked = request(demo, start, canvas_length=size)
    (result,) = Generator(demo.model).run([asked])
    check(of, demo.tokenizer, result)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("of", SCHEMAS[:9], ids=str)
def test_answers_of_random_weights_validate(
    undertrained: Pair, untrained: Model, words: Vocabulary, of: dict[str, Any], size: int
) -> None:
    """With room to spare, and with no more than the shortest answer takes."""
    start = compile_grammar(schema(of), words, "g")
    for budget in (160, start.least + 1):
        asked = request(
            undertrained, start, canvas_length=size, max_new_tokens=budget, max_denoising_steps=2
        )
        (result,) = Generator(untrained).run([asked])
        check(of, undertrained.tokenizer, result)
        assert len(result.token_ids) <= budget


@pytest.mark.parametrize("size", [4, 8, 16])
def test_too_small_a_budget_is_the_reason_given(demo: Pair, words: Vocabulary, size: int) -> None:
    start = compile_grammar(schema(SCHEMAS[7]), words, "g")
    asked = request(demo, start, canvas_length=size, max_new_tokens=start.least)
    (result,) = Generator(demo.model).run([asked])
    assert (result.finish_reason, result.token_ids) == ("length", [])


@pytest.mark.parametrize("size", [4, 8])
def test_blocks_are_as_long_as_the_canvas(demo: Pair, words: Vocabulary, size: int) -> None:
    start = compile_grammar({"type": "regex", "regex": "the sum is [0-9]{2}[.]"}, words, "g")
    asked = request(demo, start, canvas_length=size)
    generator = Generator(demo.model)
    generator.add(asked)
    events = []
    while not generator.idle:
        events += generator.step()
    blocks = [each for each in events if isinstance(each, Block)]
    assert all(len(each.tokens) == size for each in events if isinstance(each, Draft))
    assert all(len(each.tokens) == size for each in blocks[:-1])
    assert len(blocks) == -(-(len("the sum is 46.") + 1) // size)
    assert blocks[-1].tokens[-1] == END


@pytest.mark.parametrize("size", [4, 16])
def test_the_same_seed_gives_the_same_answer_on_any_device(
    demo: Pair, words: Vocabulary, size: int
) -> None:
    start = compile_grammar(schema(SCHEMAS[7]), words, "g")
    asked = request(demo, start, seed=4, canvas_length=size)
    (alone,) = Generator(demo.model).run([asked])
    whole = request(demo, start, seed=4)
    plain = Request(asked.prompt_token_ids, asked.params)
    _, among, _ = Generator(demo.model).run([plain, asked, whole])
    device = open_model(demo.graphs, check=False, backend=FakeBackend())
    (there,) = Generator(device).run([asked])
    assert alone.token_ids == among.token_ids == there.token_ids
    assert text_of(demo.tokenizer, alone)
