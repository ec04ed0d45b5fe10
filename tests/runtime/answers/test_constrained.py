"""Constrained answers are always valid: with the demo model, and with random weights, where only the grammar can make
them valid."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers import constrained, grammar
from canvasrt.runtime.answers.grammar import GrammarState, Vocabulary, compile_grammar
from canvasrt.runtime.answers.rewriting import without_unique
from canvasrt.runtime.answers.search import near, search
from canvasrt.runtime.answers.spelling import Speller
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.request import Block, Draft, Finished, Request
from tests.helpers.constrained import (
    AMPLE,
    END,
    SCHEMAS,
    check,
    request,
    schema,
    text_of,
)
from tests.helpers.reference import Pair


@pytest.mark.parametrize("of", SCHEMAS, ids=str)
def test_answers_validate(demo: Pair, words: Vocabulary, of: dict[str, Any]) -> None:
    """Answers on a whole canvas and on small canvases, which may end inside text that the schema fixes."""
    start = compile_grammar(schema(of), words, "grammar")
    asked = [request(demo, start, canvas_length=size) for size in (0, 4)]
    for result in Generator(demo.model).run(asked):
        check(of, demo.tokenizer, result)


@pytest.mark.parametrize("of", SCHEMAS[:9], ids=str)
def test_answers_of_random_weights_validate(
    undertrained: Pair, untrained: Model, words: Vocabulary, of: dict[str, Any]
) -> None:
    """The budget is either ample or just enough for the shortest answer."""
    start = compile_grammar(schema(of), words, "grammar")
    for budget, size in ((160, 0), (start.least + 1, 4)):
        asked = request(
            undertrained, start, canvas_length=size, max_new_tokens=budget, max_denoising_steps=2
        )
        (result,) = Generator(untrained).run([asked])
        check(of, undertrained.tokenizer, result)
        assert len(result.token_ids) <= budget


def test_regular_expressions_and_lark(demo: Pair, words: Vocabulary) -> None:
    digits = compile_grammar({"type": "regex", "regex": "the sum is [0-9]{2}[.]"}, words, "g")
    (result,) = Generator(demo.model).run([request(demo, digits)])
    assert re.fullmatch("the sum is [0-9]{2}[.]", text_of(demo.tokenizer, result))
    alone = compile_grammar({"type": "regex", "regex": "[0-9]+"}, words, "g")
    (result,) = Generator(demo.model).run([request(demo, alone)])
    assert text_of(demo.tokenizer, result) == "46"  # the free answer is allowed
    lark = 'start: ("ab" | "cd")+ "!"'
    grammar = compile_grammar({"type": "grammar", "grammar": lark}, words, "g")
    (result,) = Generator(demo.model).run([request(demo, grammar)])
    assert re.fullmatch("(ab|cd)+!", text_of(demo.tokenizer, result))


def test_a_budget_too_small_is_the_reason_given(demo: Pair, words: Vocabulary) -> None:
    many = {"type": "array", "items": {"type": "integer", "minimum": 100_000}, "minItems": 9}
    start = compile_grammar(schema(many), words, "g")
    (result,) = Generator(demo.model).run([request(demo, start, max_new_tokens=20)])
    assert (result.finish_reason, result.token_ids) == ("length", [])
    least = len(start.shortest(200, AMPLE) or [])
    exact = request(demo, start, max_new_tokens=least + 1)
    (result,) = Generator(demo.model).run([exact])
    check(many, demo.tokenizer, result)


def test_requests_share_a_grammar(demo: Pair, words: Vocabulary) -> None:
    """Requests only copy the grammar's matcher, since llguidance refuses calls while another thread uses it."""
    start = compile_grammar(schema(SCHEMAS[7]), words, "g")
    start._matcher = SimpleNamespace(deep_copy=start._matcher.deep_copy)
    (result,) = Generator(demo.model).run([request(demo, start)])
    check(SCHEMAS[7], demo.tokenizer, result)


def test_blocks_are_as_long_as_the_canvas(demo: Pair, words: Vocabulary) -> None:
    start = compile_grammar({"type": "regex", "regex": "the sum is [0-9]{2}[.]"}, words, "g")
    events = list(Generator(demo.model).stream(request(demo, start, canvas_length=4)))
    blocks = [each for each in events if isinstance(each, Block)]
    assert all(len(each.tokens) == 4 for each in blocks[:-1])
    assert len(blocks) == -(-(len("the sum is 46.") + 1) // 4)


def unique(values: list[Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"enum": values}, "uniqueItems": True, **more}


UNIQUE = {
    "$defs": {"set": {"uniqueItems": True, "type": "array", "items": {"$ref": "#/$defs/kind"}}}
    | {"kind": {"enum": ["a", "b", "a"]}},
    "type": "object",
    "properties": {"uniqueItems": {"$ref": "#/$defs/set"}},
    "required": ["uniqueItems"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("of", [unique([1, 2, "x"], minItems=2), UNIQUE], ids=["array", "set"])
def test_unique_items(demo: Pair, words: Vocabulary, of: dict[str, Any]) -> None:
    """A logit bias favors one value, which an array without `uniqueItems` would repeat."""
    bias = {demo.tokenizer.encode(text)[-1]: 60.0 for text in ("1", "a", ",")}
    start = compile_grammar(schema(of), words, "g")
    asked = request(demo, start, logit_bias=tuple(bias.items()))
    (result,) = Generator(demo.model).run([asked])
    check(of, demo.tokenizer, result)
    ways = [
        start.ends_after(demo.tokenizer.encode_text(each), AMPLE) for each in ("[1,2]", "[1,1]")
    ]
    assert ways == [of is not UNIQUE, False]


def test_a_set_may_bring_its_definitions() -> None:
    """pydantic writes the schema of `set[Colour]` in this way."""
    items = {"$ref": "#/$defs/Colour"}
    of = {"$defs": {"Colour": {"enum": ["a", "b"]}}, **unique([]), "items": items}
    arrays = [[], ["a"], ["b"], ["a", "b"], ["b", "a"]]
    assert without_unique(of, "g")["enum"] == arrays
    assert without_unique({**of, "type": ["array", "null"]}, "g")["enum"] == [*arrays, None]


def test_gbnf_is_read(words: Vocabulary, demo: Pair) -> None:
    text = 'root ::= ("yes" | no) [.]{2} # as in llama.cpp\nno ::= "no"'
    start = compile_grammar({"type": "grammar", "grammar": text}, words, "g")
    ways = {
        each: start.ends_after(demo.tokenizer.encode_text(each), AMPLE) for each in ("no..", "no.")
    }
    assert ways == {"no..": True, "no.": False}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "xml"}, "g.type is 'xml'"),
    ({"type": "json_schema"}, "g.schema is not an object"),
    ({"type": "regex", "regex": 3}, "g.regex is not a string"),
    ({"type": "regex", "regex": "("}, "g.regex cannot be used"),
    ({"type": "grammar", "grammar": "start: nothing"}, "g.grammar cannot be used"),
    (schema({"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable schema"),
    (schema({"$ref": "#"}), "g.schema cannot be used: .* no token may follow"),
    (
        schema({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
        r"limit 50000|allows no answer of at most 2048 tokens",
    ),
    (schema({"type": "array", "uniqueItems": True}), "g.schema has uniqueItems, but its items"),
    (schema(unique([1], type=["array", "string"])), r"its type is \['array', 'string'\]"),
    (schema(unique([1], contains={"const": 1})), "has uniqueItems next to contains"),
    (schema(unique(list(range(6)))), "more than 400 arrays satisfy its uniqueItems"),
    (schema(unique(["a" * 1000, "b" * 1000, "c", "d"])), "65 arrays satisfy its uniqueItems"),
    ({"type": "grammar", "grammar": 'root ::= "a" more'}, "Rule 'more' not found"),
    ({"type": "grammar", "grammar": "root ::= " + "(" * 5000}, "g.grammar is not a grammar"),
    ({"type": "grammar", "grammar": "root ::= [a]{3000}"}, "no answer of at most 2048 tokens"),
    ({"type": "grammar", "grammar": "#" * 17_000 + "\nroot ::= [a]"}, "g.grammar has 17013 bytes"),
    (schema({"enum": ["a" * 70_000]}), "g.schema has 70"),
    (
        schema({"type": "string", "allOf": [{"pattern": f"^(.*{c}.*){{2}}$"} for c in "abcdefgh"]}),
        "g.schema cannot be used",
    ),
    ({"type": "grammar", "grammar": "start: " + "(" * 3000}, "too deeply nested"),
    ({"type": "regex", "regex": "a?" * 5000}, "g.regex has 10000 bytes"),
    ({"type": "grammar", "grammar": "start: /" + "a?" * 9000 + "/"}, "g.grammar has 18009 bytes"),
    (
        schema({"items": [{"pattern": "a" * 5000}, {"patternProperties": {"b" * 5000: {}}}]}),
        "g.schema has 10000 bytes of patterns",
    ),
    (schema({"type": "integer", "multipleOf": 999_983}), "g.schema has multipleOf"),
    (
        schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}),
        "whose least common multiple exceeds 10000",
    ),
    (
        {"type": "grammar", "grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
        "g.grammar has multipleOf",
    ),
    (schema({"patternProperties": {f"^{n}": {} for n in range(65)}}), "has 65 patternProperties"),
    ({"type": "regex", "regex": "a{3000}"}, "allows no answer of at most 2048 tokens"),
    ({"type": "regex", "regex": "é"}, "g.regex"),  # the demo has no token for é
]


@pytest.mark.parametrize(("spec", "message"), BAD, ids=lambda each: str(each)[:40])
def test_grammars_that_cannot_be_used_are_refused(
    words: Vocabulary, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(CanvasError, match=message):
        compile_grammar(spec, words, "g")


def test_compiling_is_bounded(words: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"type": "regex", "regex": "[ab]{40}"}
    compile_grammar(spec, words, "g")
    rounds: list[Speller] = []
    choose = Speller.next
    monkeypatch.setattr(Speller, "next", lambda s, allows: rounds.append(s) or choose(s, allows))
    with pytest.raises(CanvasError, match="no answer of at most 2048 tokens"):
        compile_grammar({"type": "regex", "regex": "a" * 8_000}, words, "g")
    assert len(rounds) < 10  # forced tokens need no search
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.0)
    with pytest.raises(CanvasError, match="cannot be used: its shortest answer was not"):
        compile_grammar(spec, words, "g")


def test_a_slow_search_holds_up_nobody(
    demo: Pair, words: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def waiting(*arguments: Any) -> Any:
        assert go.wait(60)
        return search(*arguments)

    monkeypatch.setattr(constrained, "search", waiting)
    start = compile_grammar(schema({"type": "boolean"}), words, "g")
    asked = request(demo, start)
    generator = Generator(demo.model)
    generator.add(asked)
    other = generator.add(Request(asked.prompt_token_ids, asked.params))
    finished = False
    while not finished:  # the other request ends while the search is blocked
        events = generator.step()
        assert all(event.id == other for event in events)
        finished = any(isinstance(event, Finished) for event in events)
    go.set()
    events = []
    while not generator.idle:
        events += generator.step()
    assert any(isinstance(event, Draft) for event in events)
    assert text_of(demo.tokenizer, events[-1].result) in ("true", "false")  # type: ignore[union-attr]


@pytest.mark.parametrize("ways", [["46é", "9"], ["é", "46é", "463", "é9"]])
def test_what_the_vocabulary_cannot_spell_is_left_out(
    demo: Pair, words: Vocabulary, ways: list[str]
) -> None:
    """The demo has no token for `é`. Options without it are found, even if the beginning of an impossible option is
    likelier."""
    start = compile_grammar(schema({"enum": ways}), words, "g")
    for room in (6, 100):  # endings are checked only near the budget's end
        (result,) = Generator(demo.model).run([request(demo, start, "12+34=", max_new_tokens=room)])
        assert text_of(demo.tokenizer, result) == next(f'"{way}"' for way in ways if way.isascii())
    with pytest.raises(CanvasError, match="cannot be used"):
        compile_grammar(schema({"enum": ["é", "46é"]}), words, "g")


def test_the_search_finds_the_likeliest_string(words: Vocabulary, demo: Pair) -> None:
    """Compares with all strings of the grammar, which have the same length."""
    start = compile_grammar({"type": "regex", "regex": "(ab|cd|ad)x[0-3]"}, words, "g")
    options = [a + "x" + d for a in ("ab", "cd", "ad") for d in "0123"]
    for seed in range(5):
        shares = np.random.default_rng(seed).dirichlet(np.full(112, 0.2), 8)
        logs = np.log(shares + 1e-30)
        found = search(start, logs, 8, 60, 32, END, 0, AMPLE)
        assert found is not None
        assert found.ended
        scores = {
            option: sum(
                logs[place, token]
                for place, token in enumerate([*demo.tokenizer.encode(option, False), END])
            )
            for option in options
        }
        text = demo.tokenizer.decode(found.tokens[:-1])
        assert scores[text] == pytest.approx(max(scores.values()))


def test_one_ending_serves_many_strings(words: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate strings of a long answer share an ending, which is searched only once."""
    start = compile_grammar({"type": "regex", "regex": "[a-z]{80}"}, words, "g")
    looked: list[int] = []
    shortest = GrammarState.shortest
    monkeypatch.setattr(
        GrammarState, "shortest", lambda s, *given: looked.append(given[0]) or shortest(s, *given)
    )
    logs = np.log(np.random.default_rng(0).dirichlet(np.full(112, 0.2), 128) + 1e-30)
    found = search(start, logs, 128, 130, near(start), END, 0, AMPLE)
    assert found is not None
    assert (found.ended, len(found.tokens)) == (True, 81)
    assert len(looked) == 1
