"""Events as tensors: which text they contain, that the pieces add up to the answer, and that every answer ends."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from canvasrt.bundle import Bundle
from canvasrt.containers.openai.chunks import token_score, visible_scores
from canvasrt.containers.tensors import OUTPUTS
from canvasrt.containers.triton.replies import ReplyBuilder
from canvasrt.errors import CanvasError
from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.request import (
    Block,
    BlockScore,
    Draft,
    Event,
    Finished,
    Result,
    Settled,
    Timings,
)
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.scripted import core

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
    assert draft["token_ids"] == canvas.tolist()
    for reply in (draft, block, final):
        assert reply["text"] == "46"
    assert final["token_ids"] == [*ids, EOS]
    assert final["finish_reason"] == "stop"


def test_every_reply_holds_every_output_as_its_tensor_carries_it(tokenizer: Tokenizer):
    replies = ReplyBuilder(tokenizer, SamplingParams(seed=2**64 - 1), drafts=False)
    (reply,) = replies.replies(Block(0, 0, 3, [40], None))
    assert set(reply) == OUTPUTS.keys() - {"canvas", "block_scores", "stop_string"}
    types = {"BYTES": "object", "INT32": "int32", "UINT64": "uint64"}
    for name, value in reply.items():
        array = OUTPUTS[name].encode(value)
        assert array.dtype == types[OUTPUTS[name].datatype]
        assert OUTPUTS[name].decode(array) == OUTPUTS[name].from_wire(OUTPUTS[name].to_wire(array))
        assert OUTPUTS[name].decode(array) == (list(value) if value == () else value)
    assert reply["seed"] == 2**64 - 1


def test_without_a_tokenizer_there_are_ids_and_no_text():
    replies = ReplyBuilder(None, SamplingParams(), drafts=True)
    (reply,) = replies.replies(finished([40, 41], "length"))
    assert reply["text"] == ""
    assert reply["token_ids"] == [40, 41]


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
    stopped = ReplyBuilder(tokenizer, SamplingParams(), False, only_final=True, stops=["6"])
    ids = tokenizer.encode("46", add_special_tokens=False)
    (final,) = stopped.replies(Block(0, 0, 1, ids, None))
    assert (final["event"], final["text"], final["finish_reason"]) == ("final", "4", "stop")


def test_settled_pieces_and_the_rest_of_their_block_add_up(tokenizer: Tokenizer):
    replies = ReplyBuilder(tokenizer, SamplingParams(settle_steps=1, eos_token_ids=(EOS,)), False)
    ids = tokenizer.encode("4625", add_special_tokens=False)
    events = [Settled(0, 0, 2, ids[:1]), Settled(0, 0, 3, ids[1:3])]
    events.append(Block(0, 0, 4, [*ids, EOS], "stop", settled=3))
    sent = [reply for event in events for reply in replies.replies(event)]
    assert [reply["event"] for reply in sent] == ["settled", "settled", "block"]
    assert "".join(reply["text"] for reply in sent) == "4625"
    assert [token for reply in sent for token in reply["token_ids"]] == [*ids, EOS]


def test_scores_of_blocks_add_up_if_asked_for(tokenizer: Tokenizer):
    params = SamplingParams(score_blocks=True)
    replies = ReplyBuilder(tokenizer, params, drafts=False, stops=["6"])
    first, second = BlockScore(-0.5, 0), BlockScore(-2.0, 3)
    ids = tokenizer.encode("4625", add_special_tokens=False)
    (reply,) = replies.replies(Block(0, 0, 4, ids[:1], None, score=first))
    assert json.loads(reply["block_scores"]) == [{"score": -0.5, "redone": 0}]
    _, final = replies.replies(Block(0, 1, 4, ids[1:2], None, score=second))
    assert final["event"] == "final"
    assert json.loads(final["block_scores"]) == [
        {"score": -0.5, "redone": 0},
        {"score": -2.0, "redone": 3},
    ]


def test_a_stop_string_in_settled_text_ends_the_answer_before_its_block(tokenizer: Tokenizer):
    replies = ReplyBuilder(tokenizer, SamplingParams(settle_steps=1), False, stops=["62"])
    ids = tokenizer.encode("4625", add_special_tokens=False)
    first = replies.replies(Settled(0, 0, 2, ids[:2]))
    assert not replies.ended
    piece, final = replies.replies(Settled(0, 0, 5, ids[2:3]))
    assert replies.ended
    assert first[0]["text"] == "4"  # the 6 may begin the stop string
    assert piece["text"] == ""
    assert final["text"] == "4"
    assert final["token_ids"] == ids[:3]
    assert final["steps"] == [5]
    assert final["finish_reason"] == "stop"


def test_log_probabilities_have_the_bytes_of_parts_of_characters():
    pieces = ["<pad>", *(f"<0x{byte:02X}>" for byte in "é".encode()), "é"]
    byte_level = Core(
        models.BPE({each: id for id, each in enumerate(pieces)}, [], byte_fallback=True)
    )
    byte_level.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    replies = ReplyBuilder(Tokenizer(byte_level, None), SamplingParams(logprobs=True), False)
    scores = [TokenScore(token, -0.5, ((token, -0.5),), 1) for token in (1, 2, 3)]
    (reply,) = replies.replies(Block(0, 0, 1, [1, 2, 3], "length", logprobs=scores))
    shown = [token_score(each) for each in visible_scores(reply["logprobs"])]
    assert reply["text"] == "éé"
    assert [each["bytes"] for each in shown] == [[0xC3], [0xA9], [0xC3, 0xA9]]
    assert [each["top_logprobs"][0]["bytes"] for each in shown] == [[0xC3], [0xA9], [0xC3, 0xA9]]


THOUGHT = "<|channel>thought\nA < B\n<channel|>"


@pytest.mark.parametrize("size", [1, 2, 7, 99])
@pytest.mark.parametrize(
    ("opening", "said", "text"),
    [
        ("", f"{THOUGHT}one\ntwo", f"{THOUGHT}one"),
        ("", "<|tool_call>call:f{x:\n}<tool_call|>\na<", "<|tool_call>call:f{x:\n}<tool_call|>\na"),
        ("<|channel>thought\n", "so\n<channel|>one <two", "<|channel>thought\nso\n<channel|>one "),
        ("<|tool_call>call:", "f{x:<}<tool_call|>", "<|tool_call>call:f{x:<}<tool_call|>"),
    ],
)
def test_thoughts_and_calls_hold_no_stop_strings(opening: str, said: str, text: str, size: int):
    tokenizer = Tokenizer(core(), None)
    ids = tokenizer.encode(said, False)
    replies = ReplyBuilder(
        tokenizer, SamplingParams(), False, stops=["\n", "<"], control=True, opening=opening
    )
    sent: list[dict[str, Any]] = []
    for begin in range(0, len(ids), size):
        last = "length" if begin + size >= len(ids) else None
        if not replies.ended:
            sent += replies.replies(Block(0, begin // size, 1, ids[begin : begin + size], last))
    if not replies.ended:
        sent += replies.replies(finished(ids, "length"))
    assert sent[-1]["text"] == "".join(each["text"] for each in sent[:-1]) == text


def test_an_echoed_prompt_hides_no_stop_string():
    """Control tokens in an echoed prompt are text, so the answer is not taken for a thought."""
    tokenizer = Tokenizer(core(), None)
    echoed = ReplyBuilder(
        tokenizer, SamplingParams(), False, stops=["\n"], opening="<|channel>thought\n"
    )
    (reply,) = echoed.replies(Block(0, 0, 1, tokenizer.encode("\ntwo", False), "length"))[-1:]
    assert (reply["finish_reason"], reply["text"]) == ("stop", "<|channel>thought\n")


def test_a_draft_tells_what_the_canvas_holds(tokenizer: Tokenizer):
    replies = ReplyBuilder(tokenizer, SamplingParams(eos_token_ids=(EOS,)), drafts=True)
    best, noisy = tokenizer.encode("46", False), tokenizer.encode("9b", False)
    draft = Draft(
        0, 1, 3, np.array([*best, EOS]), np.array([1, 0, 0]) > 0, np.array([*noisy, 5]), 1
    )
    (reply,) = replies.replies(draft)
    view = json.loads(reply["canvas"])
    assert view["best"][:2] == ["4", "6"]
    assert view["noisy"][:2] == ["9", "b"]
    assert (view["accepted"], view["settled"], view["end"]) == ([1, 0, 0], 1, 2)


class Sender:
    """A fake of Triton's sender. If it is full, shared memory has room only for errors and ends. As in Triton, sending
    with the flag FINAL closes the sender, even if sending fails."""

    def __init__(self, full: bool) -> None:
        self.full, self.closed, self.sent = full, False, list[Any]()

    def send(self, response: Any = None, flags: Any = 0) -> None:
        assert not self.closed
        self.closed = flags != 0
        if self.full and isinstance(response, list) and ("text", b"long") in response:
            raise RuntimeError("Failed to increase the shared memory pool size")
        self.sent.append(response)


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of sinks with a fake Triton, in which a tensor is a pair and a response is a list of pairs."""
    triton = MagicMock(Tensor=lambda name, value: (name, value[0]), InferenceResponse=list)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.delitem(sys.modules, "canvasrt.containers.triton.sink", raising=False)
    module = importlib.import_module("canvasrt.containers.triton.sink")
    monkeypatch.setattr(module, "LARGE", 8)
    return module


class Fails:
    """A fake of the reply builder. It returns `replies`, or raises an exception if they are None."""

    def __init__(self, replies: list[Any] | None, ended: bool) -> None:
        self._replies, self.ended = replies, ended

    def replies(self, event: Event) -> list[Any]:
        if self._replies is None:
            raise ValueError("no replies")
        return self._replies


LONG: Any = {"event": "block", "text": "long"}


def test_the_last_reply_carries_the_flag_unless_it_is_large(sinks: Any) -> None:
    for text, sent in (("x", 2), ("long", 3)):
        sender = Sender(full=False)
        sink = sinks.ResponseSink(sender, error_events=True)
        sink.replies = Fails([{"event": "delta"}, {"event": "final", "text": text}], ended=True)
        sink.event(object())
        assert (sender.closed, len(sender.sent)) == (True, sent)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([LONG], "shared memory"),
        ([{"event": "block", "text": "x"}, LONG], "shared memory"),
        ([{"event": "final", "step": "x"}], "step"),
        (None, "no replies"),
    ],
)
def test_a_reply_that_cannot_be_sent_or_built_ends_in_an_error(
    sinks: Any, replies: Any, reason: str, ended: bool
) -> None:
    sender = Sender(full=True)
    sink = sinks.ResponseSink(sender, error_events=True)
    sink.replies = Fails(replies, ended)
    with pytest.raises((RuntimeError, ValueError, CanvasError)):
        sink.event(object())
    sink.event(finished([], "cancelled"))  # the worker cancels the request
    assert sender.closed
    (event, (_, text)) = sender.sent[-1]
    assert event == ("event", b"error")
    assert reason in json.loads(text)["message"]
    assert sink.cancelled()


def test_an_only_reply_that_cannot_be_sent_ends_in_an_error(sinks: Any) -> None:
    sender = Sender(full=True)
    with pytest.raises(RuntimeError):
        sinks.ResponseSink(sender, error_events=True).answer(LONG)
    assert sender.closed
    assert "shared memory" in str(sender.sent)


def test_a_request_ends_once(sinks: Any) -> None:
    sender = Sender(full=False)
    sink = sinks.ResponseSink(sender, error_events=True)
    sink.replies = Fails([LONG], ended=True)
    sink.event(object())
    sink.event(object())
    sink.fail(ValueError("late"))
    assert sender.closed
    assert [("text", b"long") in each for each in sender.sent if each] == [True]
