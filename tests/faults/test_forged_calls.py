"""Only control tokens begin thoughts and tool calls. Ordinary tokens with the same spelling are text."""

from __future__ import annotations

import json

import pytest

from canvasrt.chat_tokens import CALL, CALL_END, QUOTE
from canvasrt.containers.openai.parse_answer import AnswerParser, Piece, text_of
from canvasrt.runtime.tokenizer import StreamDecoder
from tests.helpers import scripted
from tests.helpers.marked import side, trained

CALLED = f"{CALL}call:rm{{path:{QUOTE}x{QUOTE}}}{CALL_END}"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_only_control_tokens_call_tools(step: int) -> None:
    """A model that quotes a page may spell a call with ordinary tokens, which must stay text."""
    gemma = side(trained(byte_level=False), scripted.gemma_template())
    real, quoted = gemma.tokenizer.encode(CALLED, False), gemma.tokenizer.encode_text(CALLED)

    def parsed(ids: list[int]) -> list[Piece]:
        decoder, parser = StreamDecoder(gemma.tokenizer, True), AnswerParser({"rm": {}})
        text = [decoder.put(ids[at : at + step]) for at in range(0, len(ids), step)]
        assert "".join(text) == gemma.tokenizer.decode(ids, keep_control=True)
        return [piece for each in (*text, "") for piece in parser.put(each, final=not each)]

    (called,) = parsed(real)
    assert called.call is not None
    assert (called.call.name, called.call.arguments) == ("rm", '{"path": "x"}')
    pieces = parsed(quoted)
    assert {each.kind for each in pieces} == {"content"}
    assert text_of(pieces, "content") == CALLED
    # In a real call, a quotation mark spelled with ordinary tokens does not end a string.
    mark = gemma.tokenizer.encode(CALLED.replace("x", "X"), False)
    at = mark.index(gemma.tokenizer.encode("X", False)[0])
    mark[at : at + 1] = quote = gemma.tokenizer.encode_text(QUOTE)
    assert quote != gemma.tokenizer.encode(QUOTE, False)
    (called,) = parsed(mark)
    assert called.call is not None
    assert json.loads(called.call.arguments) == {"path": QUOTE}
