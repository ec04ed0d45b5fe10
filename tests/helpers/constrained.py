"""Schemas, requests constrained by them, and the check of answers."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import numpy as np

from canvasrt.runtime.answers.allowance import Allowance
from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.grammar import GrammarState, Vocabulary
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Result
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.reference import Pair

END = 5  # the demo's token that ends a turn
AMPLE = Allowance(math.inf)


def vocabulary(pair: Pair) -> Vocabulary:
    config = pair.model.config
    return Vocabulary(pair.tokenizer, config.vocab_size, config.eos_token_ids)


def untrained_model(undertrained: Pair) -> Model:
    """The demo's untrained model, with its tokens in random order."""
    model = open_model(undertrained.bundle, threads=1)
    order = np.random.default_rng(0).permutation(model.config.vocab_size)
    model.host_head._table = np.asarray(model._table[order], np.float32)
    return model


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "schema": of}


def request(
    pair: Pair, start: GrammarState, text: str = "12+34=", **options: Any
) -> ConstrainedRequest:
    given = {"max_new_tokens": 160, "max_denoising_steps": 6} | options
    params = SamplingParams.from_defaults(pair.model.sampler, pair.model.config, **given)
    ids = pair.tokenizer.encode_chat([{"role": "user", "content": text}])
    return ConstrainedRequest(ids, params, start=start, end=END)


def text_of(tokenizer: Tokenizer, result: Result) -> str:
    return tokenizer.decode([token for token in result.token_ids if token != END], False)


SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"const": {"x": "y"}},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "size": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
            "more": {"type": "boolean"},
        },
        "required": ["name", "size"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"enum": ["a", "b"]},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "type": "object",
        "properties": {
            "outer": {
                "type": "object",
                "properties": {"inner": {"type": "array", "items": {"type": "number"}}},
                "required": ["inner"],
            }
        },
        "required": ["outer"],
    },
    {"type": "string", "enum": ['quote " and \\', "tab\there"]},
]


def check(of: dict[str, Any], tokenizer: Tokenizer, result: Result) -> None:
    """Check that a result ended normally and follows the schema."""
    assert result.finish_reason == "stop", (of, text_of(tokenizer, result))
    jsonschema.validate(json.loads(text_of(tokenizer, result)), of)
