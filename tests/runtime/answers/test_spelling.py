"""Grammars with a vocabulary as large as the released one: which answers are found, and their number of tokens."""

from __future__ import annotations

import json
import re
import string
from typing import Any

import jsonschema
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.grammar import GrammarState, Vocabulary, compile_grammar
from canvasrt.runtime.answers.search import near
from canvasrt.runtime.answers.spelling import Speller, Spelling, spelling_of
from tests.helpers.constrained import AMPLE
from tests.helpers.vocabulary import SIZE, large_tokenizer


@pytest.fixture(scope="module")
def large() -> Vocabulary:
    return Vocabulary(large_tokenizer(), SIZE, (1, 3))


def text_of(words: Vocabulary, tokens: list[int]) -> str:
    return bytes(words.tokenizer.decode_bytes(tokens)).decode()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
}
FIELDS = [f"field_{number}" for number in range(100)]
SCHEMAS: dict[str, tuple[dict[str, Any], int]] = {  # schema, and the most tokens of its answer
    "anything": ({"type": "object"}, 2),
    "email": ({"type": "string", "format": "email"}, 12),
    "person": (PERSON, 80),
    "long text": ({"type": "string", "minLength": 100, "maxLength": 120}, 40),
    "times": (
        {"type": "array", "items": {"type": "string", "format": "date-time"}, "minItems": 2},
        60,
    ),
    "many fields": (
        {
            "type": "object",
            "properties": {name: {"type": "string"} for name in FIELDS},
            "required": FIELDS,
            "additionalProperties": False,
        },
        1300,
    ),
    "nested": ({"type": "array", "items": PERSON, "minItems": 4}, 320),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_short_answer_is_found(large: Vocabulary, name: str) -> None:
    of, most = SCHEMAS[name]
    start = compile_grammar({"type": "json_schema", "schema": of}, large, "g")
    found = start.shortest(most, AMPLE)
    assert found is not None
    assert start.least == len(found)
    jsonschema.validate(json.loads(text_of(large, found)), of)


REGEXES = [
    "(.*a.*b.*c){2}",
    '"*x',
    '[}"]*x',
    "[a-z]{1000}",
    r"[\p{L}]{100}",
    "[a-z]*é{3}",
    "(a|b)*z{3}",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_whatever_must_be_spelled(large: Vocabulary, regex: str) -> None:
    start = compile_grammar({"type": "regex", "regex": regex}, large, "g")
    found = text_of(large, start.shortest(2048, AMPLE) or [])
    assert re.fullmatch(regex.replace(r"\p{L}", r"\w"), found)


def test_a_long_answer_is_watched_early(large: Vocabulary) -> None:
    def watched(regex: str) -> int:
        return near(compile_grammar({"type": "regex", "regex": regex}, large, "g"))

    assert watched("[0-9]{3}") == 32
    assert watched("[0-9]{50}") == 100
    assert watched("[0-9]{500}") == 192


def test_nothing_is_looked_for_in_all_tokens(
    large: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searching all tokens would take milliseconds per token of the answer, while holding Python's interpreter lock."""
    looked: list[GrammarState] = []
    allowed = GrammarState._compute_allowed
    monkeypatch.setattr(GrammarState, "_compute_allowed", lambda s: looked.append(s) or allowed(s))
    compile_grammar({"type": "json_schema", "schema": PERSON}, large, "g")
    assert not looked
    with pytest.raises(CanvasError, match="no token may follow"):
        compile_grammar({"type": "json_schema", "schema": {"$ref": "#"}}, large, "g")
    assert len(looked) == 1


def test_bytes_without_a_token_are_spelled_with_longer_ones() -> None:
    found = [b"", *(bytes([each]) for each in range(128)), "é".encode(), "aé".encode(), b"ab"]
    spelling = spelling_of(found).with_special({0})
    assert sorted(spelling.tokens) == [*range(131)]
    assert spelling.rank[spelling.tokens == 0] == 0  # the rank of closing tokens


def test_every_kind_gets_its_turn() -> None:
    spelling = spelling_of([bytes([each]) for each in range(256)])
    assert isinstance(spelling, Spelling)
    speller = Speller(spelling)
    seen = [speller.next(lambda token: True) for _ in range(600)]
    assert set(map(ord, string.digits + string.ascii_letters + '@.-/" ~')) < set(seen)
    assert [speller.next(lambda token: token in b"{\x00") for _ in range(2)] == [0, ord("{")]
    assert speller.next(lambda token: False) is None
