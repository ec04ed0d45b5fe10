"""A made-up tokenizer as large as the released model's, with words, other scripts, punctuation and bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Core

from canvasrt.runtime.tokenizer import Tokenizer

SIZE = 262_144
SPECIAL = ("<pad>", "<eos>", "<bos>", "<turn|>")
_SPACE = "\u2581"
_MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_SCRIPTS = (
    (0x0400, 0x044F),
    (0x0391, 0x03C9),
    (0x05D0, 0x05EA),
    (0x0905, 0x0939),
    (0xAC00, 0xD7A3),
)


def large_tokenizer(size: int = SIZE) -> Tokenizer:
    """Return a tokenizer with `size` tokens. As in the released vocabulary, no token has two digits. The ids of
    `SPECIAL` are 0 to 3."""
    tokens = dict.fromkeys(SPECIAL)
    for token in _tokens(random.Random(0)):
        if len(tokens) == size:
            break
        tokens[token] = None
    vocabulary = [(token, -float(len(tokens) - rank)) for rank, token in enumerate(tokens)]
    core = Core(models.Unigram(vocabulary, unk_id=1, byte_fallback=True))
    core.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    return Tokenizer(core, None)


def _tokens(draw: random.Random) -> Iterator[str]:
    """Yield tokens forever, some of them repeatedly."""
    yield from (f"<0x{byte:02X}>" for byte in range(256))
    yield from ("\n" * count for count in range(1, 32))
    yield from (_SPACE * count for count in range(1, 32))
    yield from ("\t" * count for count in range(1, 32))
    yield from "0123456789"
    for length in (1, 2):
        for marks in product(_MARKS, repeat=length):
            yield "".join(marks)
            yield _SPACE + "".join(marks)
    yield from (mark * count for mark in _MARKS for count in range(3, 17))
    yield from (chr(point) for begin, end in _SCRIPTS for point in range(begin, end + 1))
    yield from (chr(point) for point in range(0x4E00, 0x9FA6))
    while True:
        chance = draw.random()
        if chance < 0.65:
            word = _word(draw)
            yield draw.choice([word, _SPACE + word, word.capitalize(), _SPACE + word.capitalize()])
        elif chance < 0.9:
            begin, end = draw.choice(_SCRIPTS)
            letters = [chr(draw.randint(begin, end)) for _ in range(draw.randint(2, 8))]
            yield draw.choice(["", _SPACE]) + "".join(letters)
        elif chance < 0.97:
            yield chr(draw.randint(0x4E00, 0x9FA5)) + chr(draw.randint(0x4E00, 0x9FA5))
        else:
            yield draw.choice(_MARKS) + _word(draw)


def _word(draw: random.Random) -> str:
    parts = [
        draw.choice(["", *"bcdfghklmnprstvwz", "ch", "st", "tr", "pl", "th"])
        + draw.choice([*"aeiou", "ea", "ou", "io"])
        + draw.choice(["", "", "n", "r", "s", "t", "ng", "nt", "l"])
        for _ in range(draw.choice([1, 1, 2, 2, 2, 3, 3, 4]))
    ]
    return "".join(parts)
