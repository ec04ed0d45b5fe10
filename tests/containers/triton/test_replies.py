"""Events as tensors: what their texts leave out, and how the pieces add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.tensors import STREAM_MODEL, outputs_of
from canvasrt.containers.triton.replies import ReplyBuilder
from canvasrt.runtime.generator import Block, Draft, Finished, Result
from canvasrt.runtime.request import Timings
from canvasrt.runtime.sampling import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

EOS = 1


@pytest.fixture
def tokenizer(engines: Bundle) -> Tokenizer:
    return Tokenizer.load(engines)


def finished(token_ids: list[int], reason: Any) -> Finished:
    return Finished(0, Result(token_ids, [2], reason, 9, [3], Timings(0.1, 0.1)))


def test_the_end_of_the_sequence_is_a_token_and_no_text(tokenizer: Tokenizer):
    replies = ReplyBuilder(tokenizer, SamplingParams(seed=9, eos_token_ids=(EOS,)), drafts=True)
    ids = tokenizer.encode("46", add_special_tokens=False)
    canvas = np.array([*ids, EOS, *ids])
    (draft,) = replies.replies(Draft(0, 0, 3, canvas, canvas > 0))
    (block,) = replies.replies(Block(0, 0, 3, [*ids, EOS], "stop"))
    (final,) = replies.replies(finished([*ids, EOS], "stop"))
    assert draft["token_ids"].tolist() == canvas.tolist()
    for reply in (draft, block, final):
        assert reply["text"].tolist() == [b"46"]
    assert final["token_ids"].tolist() == [*ids, EOS]
    assert final["finish_reason"].tolist() == [b"stop"]


def test_every_reply_holds_every_output_in_its_type(tokenizer: Tokenizer):
    replies = ReplyBuilder(tokenizer, SamplingParams(seed=2**64 - 1), drafts=False)
    (reply,) = replies.replies(Block(0, 0, 3, [40], None))
    assert set(reply) == {tensor.name for tensor in outputs_of(STREAM_MODEL)}
    types = {"BYTES": "object", "INT32": "int32", "UINT64": "uint64"}
    for tensor in outputs_of(STREAM_MODEL):
        assert reply[tensor.name].dtype == types[tensor.datatype]
    assert reply["seed"].tolist() == [2**64 - 1]


def test_without_a_tokenizer_there_are_ids_and_no_text():
    replies = ReplyBuilder(None, SamplingParams(), drafts=True)
    (reply,) = replies.replies(finished([40, 41], "length"))
    assert reply["text"].tolist() == [b""]
    assert reply["token_ids"].tolist() == [40, 41]


def test_events_that_nobody_asked_for_are_left_out(tokenizer: Tokenizer):
    canvas = np.array([40])
    draft, block = Draft(0, 0, 1, canvas, canvas > 0), Block(0, 0, 1, [40], "length")
    quiet = ReplyBuilder(tokenizer, SamplingParams(), drafts=False)
    assert not quiet.replies(draft)
    assert quiet.replies(block)
    last_only = ReplyBuilder(tokenizer, SamplingParams(), drafts=False, only_final=True)
    assert not last_only.replies(block)
    assert last_only.replies(finished([40], "length"))
    assert not last_only.replies(finished([], "cancelled"))
